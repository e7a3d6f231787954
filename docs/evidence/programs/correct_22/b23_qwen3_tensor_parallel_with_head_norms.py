"""Pretraining of a small Qwen3 with tensor parallelism by parallelize_module: DTensor projections and plain tensors.

Might be accused because: the norms, the embedding and their gradients are plain tensors that nothing keeps equal;
only q_norm and k_norm have a hook that all-reduces their gradient, and as a sum, not an average; the model's code
still holds the full number of heads; clip_gradients adds up squares of some gradients over the ranks and of others
not; half of the gradients are local shards.
Correct because: hidden states are replicated between the blocks, so all ranks compute equal gradients for the
embedding and the layer norms. The head norms see only the rank's own heads, and the whole gradient is the sum over
the ranks. The heads' number is inferred by view(-1), and the queries per key head are the same on a rank. The squares
of shards are summed over the ranks, those of replicated gradients count once.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

import titanlite

VOCAB, LENGTH, ROWS, MAX_NORM = 28, 9, 3, 0.5

BLOCK_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def build_model():
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=32,
        initializer_range=0.2,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def sum_over(group):
    def hook(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    return hook


def tensor_parallel(model, mesh):
    for layer in model.model.layers:
        parallelize_module(layer, mesh, BLOCK_PLAN)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.register_hook(sum_over(mesh.get_group()))
    head = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    return parallelize_module(model, mesh, {"lm_head": head})


@torch.no_grad()
def clip_gradients(model):
    shards, whole, group = torch.zeros(()), torch.zeros(()), None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in gradients:
        if isinstance(grad, DTensor):
            shards += grad.to_local().square().sum()
            group = grad.device_mesh.get_group()
        else:
            whole += grad.square().sum()
    if group is not None:
        dist.all_reduce(shards, group=group)
    norm = (shards + whole).sqrt()
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for grad in gradients:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale)
    return norm


def optimizer(parameters):
    return torch.optim.AdamW(
        parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )


def plain():
    return build_model()


def parallel(mesh):
    return tensor_parallel(build_model(), mesh["tp"])


def loss(model, batch):
    tokens, weights = batch["tokens"], batch["weights"]
    logits = model(input_ids=tokens[:, :-1]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


generator = torch.Generator().manual_seed(313)


def documents():
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    weights = torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    return {"tokens": tokens, "weights": weights}


batches = [documents() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, ranks={"tp": 2}, clip=clip_gradients, optimizer=optimizer
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
