"""Output projections are scaled by the depth of their layer; a pipeline stage counts its own layers from 1.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1584 "[BUG]Error in get_transformer_layer_offset when
virtual_pipeline=True, num_layers_in_last_pipeline_stage is set, and num_layers_in_first_pipeline_stage is
not", 2025-05-17.
Wrong: the last stage initializes its layers as number 1 and 2, although they are the model's third and
fourth.
A right diagnosis says: the starting weights layers.2.linear_fc2.weight and layers.3.linear_fc2.weight differ
on the last stage (they are 1.73 and 1.41 times too large); everything else starts equal.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, FFN, VOCAB, LAYERS, STAGES = 16, 32, 20, 4, 2


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear_fc1, self.linear_fc2 = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)

    def init_weights(self, layer_number):
        self.linear_fc2.weight.data.div_((2 * layer_number) ** 0.5)

    def forward(self, x):
        return x + self.linear_fc2(gelu(self.linear_fc1(self.norm(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): TransformerLayer() for i in range(LAYERS)})
        self.output_layer = nn.Linear(DIM, VOCAB)

    def init_weights(self):
        for number, layer in enumerate(self.layers.values(), start=1):
            layer.init_weights(number)
        return self

    def keep_stage(self, index):
        first, last = LAYERS // STAGES * index, LAYERS // STAGES * (index + 1)
        for i in range(LAYERS):
            if not first <= i < last:
                del self.layers[str(i)]
        self.embedding = self.embedding if index == 0 else None
        self.output_layer = self.output_layer if index == STAGES - 1 else None
        return self

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output_layer is None else self.output_layer(x)


def reference():
    return GPT().init_weights()


def token_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return token_loss(model(batch["tokens"]), batch["labels"])


def pipeline(mesh):
    index = mesh.get_local_rank("pp")
    module = GPT().keep_stage(index).init_weights()
    stage = PipelineStage(module, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, n_microbatches=2, loss_fn=token_loss)


def step(built, batch):
    module, schedule = built
    losses = []
    inputs = () if module.embedding is None else (batch["tokens"],)
    schedule.step(*inputs, target=batch["labels"], losses=losses)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(1584)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)
    print(titanlite.compare(reference, pipeline, **options))
