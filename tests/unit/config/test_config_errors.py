"""Mistakes in files and on command lines, each with the exact lines that a person then reads."""

# A message is one line however long: that is what is shown here.
# ruff: noqa: E501

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config import JobConfig, override, parse_args
from titanlite.config.keys import job_keys
from titanlite.errors import ConfigError
from titanlite.registry import DATASETS, MODELS


@pytest.fixture(autouse=True)
def _known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that list what there is stay as they are when a model or a data set is added."""
    for registry, names in (
        (MODELS, ("image_transformer",)),
        (
            DATASETS,
            (
                *("digits", "photos", "cifar10", "synthetic", "pydoc", "text", "tokens", "hf"),
                *("hf_validation", "c4", "c4_test", "c4_validation"),
            ),
        ),
    ):
        # Last first, because the names return in the opposite order.
        for name in [name for name in reversed(registry) if name not in names]:
            monkeypatch.delitem(registry, name)


# fmt: off
BAD_FILES: list[tuple[Any, list[str]]] = [
    ('[training]\nsteps = "10"', ['training.steps: "10" is a string, not an integer; write 10, without quotes']),
    ("[training]\nsteps = true", ["training.steps: true is a boolean, not an integer; give an integer of at least 1"]),
    ("[training]\nlocal_batch_size = 2048.5", ["training.local_batch_size: 2048.5 is a number, not an integer; give an integer of at least 1"]),
    ("[training]\nsteps = 10.0", ["training.steps: 10.0 is a number, not an integer; write 10"]),
    ("[training]\nsteps = [10]", ["training.steps: [10] is a list, not an integer; give an integer of at least 1"]),
    ("[training]\nsteps = 2026-01-01", ["training.steps: 2026-01-01 is a date or time, not an integer; give an integer of at least 1"]),
    ("[training.steps]\nx = 1", ["training.steps: {x = 1} is a table, not an integer; give an integer of at least 1"]),
    ('[training]\nseq_len = "many"', ['training.seq_len: "many" is a string, not an integer; give an integer of at least 1']),
    ('[optimizer]\nlr = "8e-4"', ['optimizer.lr: "8e-4" is a string, not a number; write 0.0008, without quotes']),
    ("[optimizer]\nlr = true", ["optimizer.lr: true is a boolean, not a number; give a number above 0"]),
    ("[compile]\nenable = 1", ["compile.enable: 1 is an integer, not a boolean; give true or false"]),
    ('[compile]\nenable = "true"', ['compile.enable: "true" is a string, not a boolean; write true, without quotes']),
    ('[compile]\ncomponents = "model"', ['compile.components: "model" is a string, not a list; write ["model"]']),
    ('[compile]\ncomponents = ["model", 3]', ['compile.components: 3 is an integer, not a string; give a list of "model" and "loss"']),
    ("[job]\ndump_folder = 3", ['job.dump_folder: 3 is an integer, not a string; write "3", with quotes']),
    ('[job]\ndescription = ["a"]', ['job.description: ["a"] is a list, not a string; give a string']),
    ("[activation_checkpoint]\nselective_ac_option = 2", ['activation_checkpoint.selective_ac_option: 2 is an integer, not a string; write "2", with quotes']),
    ("[parallelism]\ntensor_parallel_degree = true", ["parallelism.tensor_parallel_degree: true is a boolean, not an integer; give an integer of at least 1"]),
    ("[model]\ndim = 96.5", ["model.dim: 96.5 is a number, not an integer; give an integer of at least 1"]),
    ('[model]\nnum_layers = "4"', ['model.num_layers: "4" is a string, not an integer; write 4, without quotes']),
    ('[metrics]\nlog_freq = "often"', ['metrics.log_freq: "often" is a string, not an integer; give an integer of at least 1']),
    ("[training]\nsteps = 0", ["training.steps: 0 is out of range; give an integer of at least 1"]),
    ("[training]\nmax_norm = 0", ["training.max_norm: 0 is out of range; give a number above 0"]),
    ("[training]\nmax_norm = nan", ["training.max_norm: nan is out of range; give a number above 0"]),
    ("[training]\nglobal_batch_size = 0", ["training.global_batch_size: 0 is out of range; give an integer of at least 1, or -1"]),
    ("[optimizer]\nlr = -1e-3", ["optimizer.lr: -0.001 is out of range; give a number above 0"]),
    ("[optimizer]\nlr = inf", ["optimizer.lr: inf is not a finite number; give a number above 0"]),
    ("[optimizer]\nbeta1 = 1", ["optimizer.beta1: 1 is out of range; give a number of at least 0 and below 1"]),
    ("[lr_scheduler]\ndecay_ratio = 1.5", ["lr_scheduler.decay_ratio: 1.5 is out of range; give a number of at least 0 and at most 1"]),
    ("[parallelism]\ndata_parallel_shard_degree = 0", ["parallelism.data_parallel_shard_degree: 0 is out of range; give an integer of at least 1, or -1"]),
    ("[parallelism]\ndata_parallel_shard_degree = -2", ["parallelism.data_parallel_shard_degree: -2 is out of range; give an integer of at least 1, or -1"]),
    ("[debug]\nseed = -1", ["debug.seed: -1 is out of range; give an integer of at least 0 and at most 9223372036854775807"]),
    ("[comm]\ntrain_timeout_seconds = 0", ["comm.train_timeout_seconds: 0 is out of range; give an integer of at least 1"]),
    ("[model]\ndim = 0", ["model.dim: 0 is out of range; give an integer of at least 1"]),
    ("[model]\nnorm_eps = -1.0", ["model.norm_eps: -1.0 is out of range; give a number above 0"]),
    ("[sampling]\nnum_samples = -1", ["sampling.num_samples: -1 is out of range; give an integer of at least 0"]),
    ("[sampling]\ntemperature = -1.0", ["sampling.temperature: -1.0 is out of range; give a number of at least 0"]),
    ("[activation_checkpoint]\nmemory_budget = 2", ["activation_checkpoint.memory_budget: 2 is out of range; give a number of at least 0 and at most 1"]),
    ('[job]\ndump_folder = ""', ['job.dump_folder: "" is empty; give a string that is not empty']),
    ('[training]\ndtype = "float8"', ['training.dtype: "float8" is not one of its values; give "float32", "float64" or "bfloat16"']),
    ('[optimizer]\nname = "adamw"', ['optimizer.name: no optimizer "adamw" is registered; give "AdamW", "Adam", "SGD" or "Muon", or set experimental.custom_import to a module that calls titanlite.register_optimizer']),
    ('[activation_checkpoint]\nmode = "some"', ['activation_checkpoint.mode: "some" is not one of its values; give "selective", "full", "memory_budget" or "none"']),
    ('[activation_checkpoint]\nselective_ac_option = "two"', ['activation_checkpoint.selective_ac_option: "two" is not one of its values; give "op", or a positive integer as a string such as "2"']),
    ('[compile]\ncomponents = ["modl"]', ['compile.components: "modl" is not one of its values; give a list of "model" and "loss"']),
    ('[job]\ndevice = "gpu"', ['job.device: "gpu" is not one of its values; give "auto", "cpu" or "cuda"']),
    ("[parallelism]\nfsdp_reshard_after_forward = true", ['parallelism.fsdp_reshard_after_forward: true is a boolean, not a string; give "default", "always" or "never"']),
    ('[lr_scheduler]\ndecay_type = "cos"', ['lr_scheduler.decay_type: no scheduler "cos" is registered; give "linear", "sqrt" or "cosine", or set experimental.custom_import to a module that calls titanlite.register_scheduler']),
    ("[training]\nstep = 10", ["training.step: there is no such key; did you mean training.steps?"]),
    ("[training]\ntensor_parallel_degree = 2", ["training.tensor_parallel_degree: there is no such key; did you mean parallelism.tensor_parallel_degree?"]),
    ("[training]\nbatch_size = 8", ["training.batch_size: there is no such key; did you mean training.local_batch_size?"]),
    ("[training]\ncolour = 3", ["training.colour: there is no such key; see --help training"]),
    ("[trainin]\nsteps = 3", ["trainin: there is no such section; did you mean [training]?"]),
    ('[wandb]\nproject = "x"', ["wandb: there is no such section; see --help for all sections"]),
    ("[float8]\nemulate = true", ["float8: there is no such section; did you mean [quantize.linear.float8]?"]),
    ("steps = 10", ["steps: there is no such key; did you mean training.steps?"]),
    ("training = 3", ["training: 3 is not a section; write [training] above its keys"]),
    ("[[training]]\nsteps = 3", ["training: [{steps = 3}] is not a section; write [training] above its keys"]),
    ("[model]\nheads = 4", ["model.heads: there is no such key; did you mean model.num_heads?"]),
    ("[model]\nn_layers = 4", ["model.n_layers: there is no such key; did you mean model.num_layers?"]),
    ("[model]\ncolour = 3", ["model.colour: there is no such key; the keys of image_transformer are dim, num_layers, num_heads, num_kv_heads, ffn_hidden_dim, vocab_size, image_height, image_width, image_channels, norm_eps, zero_init_output, dropout"]),
    ("[training.loader]\nnum_workers = 2", ["training.loader: there is no such section; did you mean [training.dataloader]?"]),
    ('[model]\nname = "llama4"', ['model.name: "llama4" is a TorchTitan model that titanlite does not have; give "image_transformer", or set experimental.custom_import to a module that registers your model']),
    ('[model]\nflavor = "8B"', ['model.flavor: image_transformer has no flavor "8B"; give "digits", "cifar" or "debug"']),
    ('[model]\nflavor = "digit"', ['model.flavor: image_transformer has no flavor "digit"; did you mean "digits"?']),
    ('[training]\ndataset = "cc12m-wds"', ['training.dataset: "cc12m-wds" is a TorchTitan data set that titanlite does not have; give "digits", "photos", "cifar10", "synthetic", "pydoc", "text", "tokens", "hf", "hf_validation", "c4", "c4_test" or "c4_validation"']),
    ('[training]\ndataset = "c4"', ['training.dataset: "c4" has text, but the model takes images; set training.dataset to "digits" or "synthetic", or model.name to a language model']),
    ('[training]\ndataset = "photo"', ['training.dataset: there is no data set "photo"; did you mean "photos"?']),
    ('[experimental]\ncustom_import = "no_such_package.model"', ['experimental.custom_import: importing "no_such_package.model" failed with ModuleNotFoundError (No module named \'no_such_package\'); give a module that can be imported from "{CWD}"']),
    ("[parallelism]\npipeline_parallel_degree = 8", ["parallelism.pipeline_parallel_degree: 8 stages for 4 blocks, embeddings counted as 1 and output as 1; give fewer ranks, or a model of at least 6 blocks"]),
    ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F2B"', ["parallelism.pipeline_parallel_schedule: there is no schedule '1F2B'; did you mean 1F1B?"]),
    ("[training]\nlocal_batch_size = 2\n[parallelism]\npipeline_parallel_degree = 4", ["parallelism.pipeline_parallel_microbatch_size: 1 splits training.local_batch_size 2 into 2 microbatches, but 1F1B needs at least as many microbatches as stages (4), not 2; set training.local_batch_size to 4"]),
    ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_last_stage_less_layers = 9", ["parallelism.pipeline_parallel_last_stage_less_layers: 9 is more than the 7 blocks of a stage; give at most 7"]),
    ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3", ["parallelism.pipeline_parallel_microbatch_size: 3 does not divide training.local_batch_size 8; give 2 or 4"]),
    ("[training]\nlocal_batch_size = 1000000000\n[parallelism]\npipeline_parallel_degree = 2", ["parallelism.pipeline_parallel_microbatch_size: 1 splits training.local_batch_size 1000000000 into 1000000000 microbatches, but at most 10000 are supported; give a larger value, or a smaller training.local_batch_size"]),
    ("[parallelism]\npipeline_parallel_degree = 1000000000", ["parallelism.pipeline_parallel_degree: 1000000000 stages for 4 blocks, embeddings counted as 1 and output as 1; give fewer ranks, or a model of at least 999999998 blocks"]),
    ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 8", ["parallelism.pipeline_parallel_microbatch_size: 8 splits training.local_batch_size 8 into 1 microbatch, but 1F1B needs at least as many microbatches as stages (2), not 1; set it to 4, or training.local_batch_size to 16"]),
    ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 2", ["parallelism.pipeline_parallel_layers_per_stage: 2 splits 6 blocks, counting embeddings and output, into 3 stages for 2 ranks, but 1F1B needs 1 per rank; give 3"]),
    ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipe"', ["parallelism.pipeline_parallel_schedule: there is no schedule 'DualPipe'; did you mean DualPipeV or GPipe?"]),
    ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule_csv = "no.csv"', ["parallelism.pipeline_parallel_schedule_csv: no.csv: cannot be read (No such file or directory); give a valid schedule"]),
    ('[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["embeddings", "layers.0"], ["layer.1", "layers.2", "layers.3", "norm", "output"]]', ['parallelism.module_fqns_per_model_part: the model has no module "layer.1"; did you mean "layers.1"?']),
    ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n[compile]\nenable = true', ['compile.components: "model" does not work with ZBVZeroBubble, which computes input and weight gradients separately; remove "model", or set parallelism.pipeline_parallel_schedule to "1F1B" or "Interleaved1F1B"']),
    ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\nfsdp_reshard_after_forward = "always"', ['parallelism.fsdp_reshard_after_forward: "always" does not work with ZBVZeroBubble, which computes input and weight gradients separately: if FSDP frees the weights in between, it loses weight gradients; give "default" or "never"']),
    ('[model]\nflavor = "debug"\n[parallelism]\ntensor_parallel_degree = 8', ["parallelism.tensor_parallel_degree: 8 leaves 2 ranks without a part of model.vocab_size 17, but loss parallel needs one on each rank; give 4, or set parallelism.disable_loss_parallel = true"]),
    ('[model]\nflavor = "debug"\n[parallelism]\ntensor_parallel_degree = 8\ndata_parallel_shard_degree = 2\ndisable_loss_parallel = true', ["parallelism.tensor_parallel_degree: 8 leaves 2 ranks without a part of model.vocab_size 17, but FSDP2 needs one on each rank; give 4"]),
    ('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n[activation_checkpoint]\nselective_ac_option = "op"', ['activation_checkpoint.selective_ac_option: "op" does not work with ZBVZeroBubble, which computes input and weight gradients separately, because PyTorch can use the saved outputs only once; give "1" or another number, or set mode = "none"']),
    ("[profiling]\nenable_pipeline_timeline = true", ["profiling.enable_pipeline_timeline: there is no pipeline to draw; set it to false, or set parallelism.pipeline_parallel_degree to 2 or more"]),
    ("[parallelism]\ncontext_parallel_degree = 3", ['parallelism.context_parallel_degree: the 64 tokens of a sequence are not a multiple of context_parallel_degree 3 x 2 ("headtail"); give 2 or 4']),
    ("[parallelism]\ncontext_parallel_degree = 64", ['parallelism.context_parallel_degree: the 64 tokens of a sequence are not a multiple of context_parallel_degree 64 x 2 ("headtail"); give 32']),
    ('[parallelism]\ncontext_parallel_degree = 128\ncontext_parallel_load_balancer = "none"', ["parallelism.context_parallel_degree: the 64 tokens of a sequence are not a multiple of context_parallel_degree 128; give 64"]),
    ("[parallelism]\ncontext_parallel_degree = 32\ntensor_parallel_degree = 2", ['parallelism.context_parallel_degree: the 64 tokens of a sequence are not a multiple of context_parallel_degree 32 x 2 ("headtail") x tensor_parallel_degree 2; give 16']),
    ('[parallelism]\ncontext_parallel_rotate_method = "ring"', ['parallelism.context_parallel_rotate_method: "ring" is not one of its values; give "allgather" or "alltoall"']),
    ("[parallelism]\nenable_async_tensor_parallel = true", ["parallelism.enable_async_tensor_parallel: there is no tensor parallelism to overlap; set it to false, or set parallelism.tensor_parallel_degree to 2 or more"]),
    ('[parallelism]\nasync_tensor_parallel_backend = "ring"', ['parallelism.async_tensor_parallel_backend: "ring" has no effect without async TP; remove it, or set parallelism.enable_async_tensor_parallel = true']),
    ('[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true\nasync_tensor_parallel_backend = "symmetric_memory"', ['parallelism.enable_async_tensor_parallel: symmetric memory needs the compiler, but the model is not compiled; set compile.enable = true with "model" in compile.components, or parallelism.async_tensor_parallel_backend = "ring"']),
    ('[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true\nasync_tensor_parallel_backend = "symmetric_memory"\n[compile]\nenable = true\nbackend = "aot_eager"', ['parallelism.enable_async_tensor_parallel: symmetric memory needs inductor, but compile.backend is "aot_eager"; set compile.backend = "inductor", or parallelism.async_tensor_parallel_backend = "ring"']),
    ('[parallelism]\nexpert_tensor_parallel_degree = "2"', ['parallelism.expert_tensor_parallel_degree: "2" asks for a TorchTitan feature that titanlite does not have; write 1, or remove this line']),
    ('[parallelism]\ncontext_parallel_load_balancer = "ptrr"', ['parallelism.context_parallel_load_balancer: "ptrr" asks for a TorchTitan feature that titanlite does not have; give "headtail", "striped" or "none"']),
    ('[comm]\nmode = "fake_backend"', ['comm.mode: "fake_backend" asks for a TorchTitan feature that titanlite does not have; give "default", "debug", "threads" or "local_tensor"']),
    ('[model]\ntokenizer_path = "./tokenizer.model"', ['model.tokenizer_path: "./tokenizer.model" asks for a TorchTitan feature that titanlite does not have; remove this line']),
    ('[job]\nuse_for_integration_test = true', ["job.use_for_integration_test: was for TorchTitan's own tests; remove this line"]),
    ('[checkpoint]\ninitial_load_dequantize = true', ['checkpoint.initial_load_dequantize: asks for a TorchTitan feature that titanlite does not have; remove this line']),
    ('[checkpoint]\nmodel_weights_only = false', ['checkpoint.model_weights_only: there is no such key; did you mean checkpoint.last_save_model_only?']),
    ('[validation]\nsave_img_folder = "img"', ["validation.save_img_folder: belongs to TorchTitan's model flux, which titanlite does not have; remove this line"]),
    ('[encoder]\nt5_encoder = "google/t5-v1_1-xxl"', ["encoder: belongs to TorchTitan's model flux, which titanlite does not have; remove this section"]),
    ('[quantize.moe.float8]\nfqns = ["experts"]', ["quantize.moe: there is no such section; did you mean [quantize.grouped_mm]?"]),
    ('[model]\nconverters = ["quantize.grouped_mm.mx"]', ['model.converters: "quantize.grouped_mm.mx" asks for a TorchTitan feature that titanlite does not have; give a list of "quantize.linear.float8"']),
    ('[model]\nconverters = ["quantize.linear.float8"]\n[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true', ['parallelism.enable_async_tensor_parallel: it does not support float8 scales; set it to false, or remove "quantize.linear.float8" from model.converters']),
    ('[model]\nconverters = ["float8"]', ['model.converters: "float8" is not one of its values; give a list of "quantize.linear.float8"']),
    ("[checkpoint]\ninitial_load_in_hf_quantized = true", ["checkpoint.initial_load_in_hf_quantized: true asks for a TorchTitan feature that titanlite does not have; write false, or remove this line"]),
    ("[checkpoint]\ncreate_seed_checkpoint = true", ["checkpoint.create_seed_checkpoint: nothing would be saved; set checkpoint.enable = true and checkpoint.load_only = false, or remove this key"]),
    ("[checkpoint]\nenable = true\nlast_save_in_hf = true\nlast_save_model_only = false", ["checkpoint.last_save_in_hf: a .safetensors file holds only weights; set checkpoint.last_save_model_only = true"]),
    ("[checkpoint]\nenable = true\ninitial_load_in_hf = true", ["checkpoint.initial_load_in_hf: there is nothing to load; give checkpoint.initial_load_path, or remove this key"]),
    ('[checkpoint]\nenable = true\ninitial_load_path = "nowhere"', ['checkpoint.initial_load_path: "nowhere" is not a folder; give the step-N folder of a checkpoint, or set checkpoint.initial_load_in_hf for a .safetensors file']),
    ('[checkpoint]\nenable = true\ninitial_load_path = "nowhere"\ninitial_load_in_hf = true', ['checkpoint.initial_load_path: "nowhere" is neither a .safetensors file nor a folder of such files; give one of them']),
    ('[checkpoint]\ninitial_load_path = "nowhere"\nload_step = 0', [f"checkpoint.{name}: checkpoint.enable is false, so nothing is loaded; set checkpoint.enable = true, or remove this key" for name in ("initial_load_path", "load_step")]),
    ("[checkpoint]\nload_step = -2", ["checkpoint.load_step: -2 is out of range; give an integer of at least -1"]),
    ('[checkpoint]\nexclude_from_loading = ["model"]', ['checkpoint.exclude_from_loading: "model" is not one of its values; give a list of "optimizer" and "lr_scheduler" and "dataloader" and "train_state"']),
    ("[memory_estimation]\nenable = true\ndisable_fake_mode = true", ["memory_estimation.disable_fake_mode: true estimates with real tensors, which titanlite does not do; write false, or remove this line"]),
    ("[optimizer]\nearly_step_in_backward = true", ["optimizer.early_step_in_backward: true asks for a TorchTitan feature that titanlite does not have; write false, or remove this line"]),
    ("[training.dataloader]\nnum_workers = 2", ["training.dataloader.num_workers: 2 asks for a TorchTitan feature that titanlite does not have; write 0, or remove this line"]),
    ("[parallelism]\ntensor_parallel_degree = 3", ["parallelism.tensor_parallel_degree: 3 does not divide model.num_heads 4 or model.ffn_hidden_dim 256 or the number of tokens 64; give 2 or 4"]),
    ("[parallelism]\ntensor_parallel_degree = 8", ["parallelism.tensor_parallel_degree: 8 does not divide model.num_heads 4; give 4"]),
    ("[model]\nnum_kv_heads = 2\n[parallelism]\ntensor_parallel_degree = 4", ["parallelism.tensor_parallel_degree: 4 does not divide model.num_kv_heads 2; give 2"]),
    ('[model]\nflavor = "cifar"\n[training]\ndataset = "photos"\n[parallelism]\ntensor_parallel_degree = 4', ["parallelism.tensor_parallel_degree: 4 does not divide model.num_heads 2; give 2"]),
    ('[model]\nnum_heads = 8\nvocab_size = 4\n[training]\ndataset = "synthetic"\n[parallelism]\ntensor_parallel_degree = 8', ["parallelism.tensor_parallel_degree: 8 is more than model.vocab_size 4; give 4"]),
    ("[model]\nnum_heads = 5", ["model.num_heads: 5 does not divide model.dim 96; give 4 or 6"]),
    ("[model]\nnum_kv_heads = 3", ["model.num_kv_heads: 3 does not divide model.num_heads 4; give 2 or 4"]),
    ("[training]\nseq_len = 2048", ["training.seq_len: 2048 is not the sequence length of the model; remove this key, or give 64"]),
    ("[validation]\nenable = true\nseq_len = 32", ["validation.seq_len: 32 is not the sequence length of training; remove this key, or give 64"]),
    ('[training]\ndataset = "photos"', ['training.dataset: "photos" has images of at most 427 x at most 64 x 3 and 256 values, but the model takes 8 x 8 x 1 and 17; set training.dataset to "digits" or "synthetic", or model.flavor to "cifar"']),
    ('[model]\nflavor = "cifar"\nimage_width = 80\n[training]\ndataset = "photos"', ['training.dataset: "photos" has images of at most 427 x at most 64 x 3 and 256 values, but the model takes 32 x 80 x 3 and 256; set training.dataset to "synthetic", or model.image_width to at most 64']),
    ('[model]\nflavor = "cifar"', ['training.dataset: "digits" has images of 8 x 8 x 1 and 17 values, but the model takes 32 x 32 x 3 and 256; set training.dataset to "photos", "cifar10" or "synthetic", or model.flavor to "digits" or "debug"']),
    ("[model]\nvocab_size = 10", ['training.dataset: "digits" has images of 8 x 8 x 1 and 17 values, but the model takes 8 x 8 x 1 and 10; set training.dataset to "synthetic", or model.vocab_size to 17']),
    ('[training]\ndataset = "cifar10"\n[model]\nflavor = "cifar"', ['training.dataset_path: is not set, but "cifar10" is read from disk; give its folder']),
    ('[training]\ndataset = "cifar10"\ndataset_path = "/nowhere"\n[model]\nflavor = "cifar"', ['training.dataset_path: "/nowhere" is not a folder; give the folder of "cifar10"']),
    ('[training]\ndataset_path = "data"', ['training.dataset_path: "digits" is not read from a folder; remove this key']),
    ('[validation]\nenable = true\ndataset = "photos"', ['validation.dataset: "photos" has images of at most 427 x at most 64 x 3 and 256 values, but the model takes 8 x 8 x 1 and 17; set validation.dataset to "digits" or "synthetic"']),
    ("[training]\nglobal_batch_size = 20\n[parallelism]\ndata_parallel_shard_degree = 1", ["training.global_batch_size: 20 is not a multiple of 8 (local_batch_size 8 x data-parallel degree 1); give 16 or 24"]),
    ("[training]\nglobal_batch_size = 16\n[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2", ["training.global_batch_size: 16 is not a multiple of 32 (local_batch_size 8 x data-parallel degree 4); give 32"]),
    ("[training]\nsteps = 100\n[lr_scheduler]\ntotal_steps = 50", ["lr_scheduler.total_steps: 50 is less than training.steps 100; give at least 100"]),
    ('[activation_checkpoint]\nmode = "memory_budget"', ['activation_checkpoint.mode: "memory_budget" needs a compiled model; set compile.enable = true with "model" in compile.components, or give another mode']),
    ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\ndebug = true', ['activation_checkpoint.debug: PyTorch cannot record with selective_ac_option "op"; set it to false, or set selective_ac_option to "1"']),
    ("[compile]\nenable = true\ncomponents = []", ['compile.components: is empty, so nothing would be compiled; add "model" or "loss", or set compile.enable = false']),
    ("[optimizer]\nmomentum = 0.9", ['optimizer.momentum: it is only for SGD and Muon, but optimizer.name is "AdamW"; remove this key']),
    ("[optimizer]\nns_steps = 4", ['optimizer.ns_steps: it is only for Muon, but optimizer.name is "AdamW"; remove this key']),
    ('[optimizer]\nname = "SGD"\nimplementation = "fused"', ['optimizer.implementation: PyTorch\'s "fused" SGD does not support sharded weights; give "foreach", or remove this key']),
    ("[profiling]\nenable_profiling = true\nprofile_freq = 3", ["profiling.profile_freq: 3 is less than profiler_warmup 3 + profiler_active 1; give at least 4"]),
    ("import torch\nprint(1)", ['job.config_file: "{FILE}" is a Python program, not TOML; run it with `python`, and give a TOML file here']),
    ("[training]\nsteps = ten", ['job.config_file: "{FILE}" line 2 is not TOML: invalid value; correct "steps = ten", with text in quotes']),
    ('[checkpoint]\nexclude_from_loading = ["optimizer",\n[training]\nsteps = 3', ['job.config_file: "{FILE}" line 2 is not TOML: "exclude_from_loading = [\\"optimizer\\"," opens a list that is not closed; add the ]']),
    ('[checkpoint]\nexclude_from_loading = [\n  "optimizer",\nenable = true', ['job.config_file: "{FILE}" line 2 is not TOML: "exclude_from_loading = [" opens a list that is not closed; add the ]']),
    ('[checkpoint]\nexclude_from_loading = ["optimizer"', ['job.config_file: "{FILE}" line 2 is not TOML: "exclude_from_loading = [\\"optimizer\\"" opens a list that is not closed; add the ]']),
    # A list that ends is not at fault, whatever is in its texts.
    ('[checkpoint]\nexclude_from_loading = [ # ]\n  "[",\n  optimizer,\n]', ['job.config_file: "{FILE}" line 4 is not TOML: invalid value; correct "optimizer,", with text in quotes']),
    ("[training\nsteps = 1", ["job.config_file: \"{FILE}\" line 1 is not TOML: expected ']' at the end of a table declaration; correct \"[training\""]),
    ("[training]\nsteps = 1\nsteps = 2", ['job.config_file: "{FILE}" line 3 is not TOML: cannot overwrite a value; correct "steps = 2"']),
    ("[training]\nsteps =", ['job.config_file: "{FILE}" line 2 is not TOML: invalid value; correct "steps =", with text in quotes']),
    ("[training]\n[training]", ["job.config_file: \"{FILE}\" line 2 is not TOML: cannot declare ('training',) twice; correct \"[training]\""]),
    ('name = "open', ['job.config_file: "{FILE}" line 1 is not TOML: unterminated string; correct "name = \\"open"']),
    ("= 3", ['job.config_file: "{FILE}" line 1 is not TOML: invalid statement; correct "= 3"']),
    ('[validation]\nenable = true\ndataset = "coco-validation"', ['validation.dataset: "coco-validation" is a TorchTitan data set that titanlite does not have; give "digits", "photos", "cifar10", "synthetic", "pydoc", "text", "tokens", "hf", "hf_validation", "c4", "c4_test" or "c4_validation"']),
    ('[sampling]\nprompt = "The"', ['sampling.prompt: "digits" is not text; remove this key']),
    ('[sampling]\nnum_tokens = 9', ['sampling.num_tokens: "digits" is not text; remove this key']),
    ('[training]\nattend_across_documents = false', ['training.attend_across_documents: "digits" has no documents; remove this key, or train on text']),
    ('[activation_checkpoint]\nselective_ac_option = "0"', ['activation_checkpoint.selective_ac_option: "0" is not one of its values; give "op", or a positive integer as a string such as "2"']),
    ("[model.rope]\ntheta = 1", ["model.rope: there is no such key; the keys of image_transformer are dim, num_layers, num_heads, num_kv_heads, ffn_hidden_dim, vocab_size, image_height, image_width, image_channels, norm_eps, zero_init_output, dropout"]),
    ("[fault_tolerance]\nenable = true", ["fault_tolerance.enable: true asks for a TorchTitan feature that titanlite does not have; write false, or remove this line"]),
    ("[quantize]\nlinear = 3", ["quantize.linear: 3 is not a section; write [quantize.linear] above its keys"]),
    ('[job]\ncustom_config_module = "my.config"', ['job.custom_config_module: "my.config" asks for a TorchTitan feature that titanlite does not have; name a module that registers your model in experimental.custom_import, or remove this line']),
    ("[validation]\nsteps = 0", ["validation.steps: 0 is out of range; give an integer of at least 1, or -1"]),
    ("[validation]\nfreq = 0", ["validation.freq: 0 is out of range; give an integer of at least 1"]),
]

BAD_COMMAND_LINES: list[tuple[Any, list[str]]] = [
    (["configs.toml"], ['"configs.toml": is not an option; write --job.config_file=configs.toml']),
    (["-training.steps=3"], ['"-training.steps=3": is not an option; write --section.key=value']),
    (["--"], ['"--": is not an option; write --section.key=value']),
    (["--training.steps"], ["training.steps: has no value; write --training.steps=value"]),
    (["--training.steps="], ['training.steps: "" is a string, not an integer; give an integer of at least 1']),
    (["--training.steps=ten"], ['training.steps: "ten" is a string, not an integer; give an integer of at least 1']),
    (["--training.steps=1e3"], ["training.steps: 1000.0 is a number, not an integer; write 1000"]),
    (["--training.steps", "--compile.enable"], ["training.steps: has no value; write --training.steps=value"]),
    (["--steps=10"], ["--steps: there is no such option; did you mean --training.steps?"]),
    (["--tp=2"], ["--tp: there is no such option; did you mean --parallelism.tensor_parallel_degree?"]),
    (["--compile.enable=yes"], ['compile.enable: "yes" is a string, not a boolean; give true or false']),
    (["--compile.enable=1"], ['compile.enable: "1" is a string, not a boolean; give true or false']),
    (["--compile.no-enable"], ["compile.no_enable: there is no such key; did you mean compile.enable?"]),
    (["--compile.components=model,los"], ['compile.components: "los" is not one of its values; give a list of "model" and "loss"']),
    (["--optimizer.lr=fast"], ['optimizer.lr: "fast" is a string, not a number; give a number above 0']),
    (["--optimizer.lr=none"], ['optimizer.lr: "none" is a string, not a number; give a number above 0']),
    (["--model.dim=big"], ['model.dim: "big" is a string, not an integer; give an integer of at least 1']),
    (["--model.depth=3"], ["model.depth: there is no such key; the keys of image_transformer are dim, num_layers, num_heads, num_kv_heads, ffn_hidden_dim, vocab_size, image_height, image_width, image_channels, norm_eps, zero_init_output, dropout"]),
    (["--model.zero_init_output=maybe"], ['model.zero_init_output: "maybe" is a string, not a boolean; give true or false']),
    (["--job.config_file"], ["job.config_file: has no value; write --job.config_file=value"]),
    (["--job.config_file="], ['job.config_file: "" does not exist; give a TOML file']),
    (["--job.config_file=/nowhere/job.toml"], ['job.config_file: "/nowhere/job.toml" does not exist; give a TOML file']),
    (["--job.config_file=/"], ['job.config_file: "/" is a folder; give a TOML file']),
    (["--job.config_file=a.toml", "--job.config_file=b.toml"], ["job.config_file: given 2 times; give one file"]),
    (["--training.dtype=fp8", "--training.step=1", "--parallelism.tensor_parallel_degree=3", "--optimizer.early_step_in_backward=true", "--training.global_batch_size=-2"], ["training.step: there is no such key; did you mean training.steps?", "training.global_batch_size: -2 is out of range; give an integer of at least 1, or -1", 'training.dtype: "fp8" is not one of its values; give "float32", "float64" or "bfloat16"', "optimizer.early_step_in_backward: true asks for a TorchTitan feature that titanlite does not have; write false, or remove this option", "parallelism.tensor_parallel_degree: 3 does not divide model.num_heads 4 or model.ffn_hidden_dim 256 or the number of tokens 64; give 2 or 4"]),
    (["--model.name=flux", "--model.dim=3"], ['model.name: "flux" is a TorchTitan model that titanlite does not have; give "image_transformer", or set experimental.custom_import to a module that registers your model']),
    (["--parallelism.expert-tensor-parallel-degree=2"], ["parallelism.expert_tensor_parallel_degree: 2 asks for a TorchTitan feature that titanlite does not have; write 1, or remove this option"]),
    (["--training.seq_len=64.0"], ["training.seq_len: 64.0 is a number, not an integer; write 64"]),
    (["--debug.seed=99999999999999999999"], ["debug.seed: 99999999999999999999 is out of range; give an integer of at least 0 and at most 9223372036854775807"]),
    (["--job.dump_folder="], ['job.dump_folder: "" is empty; give a string that is not empty']),
    (["--training.dataset=di\ngits"], ['training.dataset: there is no data set "di\\ngits"; did you mean "digits"?']),
]
# fmt: on


def problems_of(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    return list(caught.value.problems)


@pytest.mark.parametrize(("text", "expected"), BAD_FILES, ids=lambda part: str(part)[:60])
def test_bad_file(text: str, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    found = problems_of([f"--job.config_file={file}"])
    assert found == [line.format(FILE=file, CWD=os.getcwd()) for line in doubled(expected)]


@pytest.mark.parametrize(("argv", "expected"), BAD_COMMAND_LINES, ids=lambda part: str(part)[:60])
def test_bad_command_line(argv: list[str], expected: list[str]) -> None:
    assert problems_of(argv) == expected


def doubled(lines: list[str]) -> list[str]:
    """Braces doubled for str.format, save those of the two placeholders."""
    out = []
    for line in lines:
        plain = line.replace("{", "{{").replace("}", "}}")
        out.append(plain.replace("{{FILE}}", "{FILE}").replace("{{CWD}}", "{CWD}"))
    return out


def test_there_are_at_least_sixty_of_them() -> None:
    assert len(BAD_FILES) + len(BAD_COMMAND_LINES) >= 60


def test_a_message_is_one_line_with_what_to_do() -> None:
    rows = BAD_FILES + BAD_COMMAND_LINES
    for line in (line for _, lines in rows for line in lines):
        assert "\n" not in line
        where, _, rest = line.partition(": ")
        assert where
        assert "; " in rest, line


def test_problems_of_file_and_command_line_come_together(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[training]\nsteps = "10"\n[optimizer]\nlr = 0\n[chekpoint]\nenable = true\n')
    argv = [f"--job.config_file={file}", "--parallelism.tensor_parallel_degree=3", "--trainin.x=1"]
    assert [line.partition(":")[0] for line in problems_of(argv)] == [
        "trainin.x",
        "training.steps",
        "optimizer.lr",
        "chekpoint",
        "parallelism.tensor_parallel_degree",
    ]


TOGETHER: list[tuple[str, list[str], list[str]]] = [
    # An unknown name keeps silent only about the key that it may have meant.
    (
        "[checkpoint]\nenable = true\nfoo = 1\nlast_save_in_hf = true\nlast_save_model_only = false",
        [],
        ["checkpoint.foo", "checkpoint.last_save_in_hf"],
    ),
    (
        "[training]\nglobal_batch_size = 20\nbatch_size = 4\n[parallelism]\ndata_parallel_shard_degree = 1",
        [],
        ["training.batch_size"],
    ),
    # One in [model] that is like no key there leaves the sizes known.
    (
        "[model]\ncolour = 3\n[parallelism]\ntensor_parallel_degree = 3",
        [],
        ["model.colour", "parallelism.tensor_parallel_degree"],
    ),
    ("[model]\nheads = 3\n[parallelism]\ntensor_parallel_degree = 3", [], ["model.heads"]),
    # A flavor of the wrong type does not hide names that no flavor has.
    ("[model]\nflavor = 3\ncolour = 3", [], ["model.flavor", "model.colour"]),
    # Each wrong item of a list.
    ('[compile]\ncomponents = ["modl", 3]', [], ["compile.components", "compile.components"]),
    # Each wrong thing about a pipeline.
    (
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F2B"\npipeline_parallel_microbatch_size = 3',
        [],
        ["parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_schedule"],
    ),
    # What is wrong with the file does not hide what is wrong on the command line.
    (
        "[training\n",
        ["--trainin.x=1", "--training.steps=ten"],
        ["job.config_file", "trainin.x", "training.steps"],
    ),
]


@pytest.mark.parametrize(("text", "argv", "expected"), TOGETHER)
def test_problems_that_can_be_known_together_come_together(
    text: str, argv: list[str], expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    found = problems_of([f"--job.config_file={file}", *argv])
    assert [line.partition(":")[0] for line in found] == expected


def test_a_key_that_is_wrong_itself_is_not_blamed_again() -> None:
    # With steps unknown, nothing can be said about the schedule.
    assert problems_of(["--training.steps=x", "--lr_scheduler.total_steps=1"]) == [
        'training.steps: "x" is a string, not an integer; give an integer of at least 1'
    ]


def test_command_line_mends_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[training]\nsteps = "10"\n')
    config = parse_args([f"--job.config_file={file}", "--training.steps=10"])
    assert config.training.steps == 10


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe[\x00", "is not UTF-8 text (byte 0); save it as UTF-8"),
        (b'name = "caf\xe9"', "is not UTF-8 text (byte 11); save it as UTF-8"),
        (b"[job]\nx = " + b"[" * 100_000, "is nested too deeply; give a flat TOML file"),
    ],
    ids=["utf-16", "latin-1", "deep"],
)
def test_file_that_is_no_text(content: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(content)
    assert problems_of([f"--job.config_file={file}"]) == [f'job.config_file: "{file}" {expected}']


def test_the_line_is_named_even_where_only_blanks_follow(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[job]\n\n\x0b\n")
    (problem,) = problems_of([f"--job.config_file={file}"])
    assert problem.startswith(f'job.config_file: "{file}" line 3 is not TOML: ')


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    assert problems_of([f"--job.config_file={tmp_path}"]) == [
        f'job.config_file: "{tmp_path}" is a folder; give a TOML file'
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.touch(mode=0o000)
    assert problems_of([f"--job.config_file={file}"]) == [
        f'job.config_file: "{file}" cannot be read (permission denied); change its permissions'
    ]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_logger_that_is_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems_of([f"--metrics.enable_{package}"]) == [
        f"metrics.enable_{package}: the package {package} is not installed; "
        f'pip install "titanlite[{package}]"'
    ]


def test_problems_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a: b; c", "d: e; f")))
    assert error.problems == ("a: b; c", "d: e; f")
    assert str(error) == "a: b; c\nd: e; f"


def test_make_config_and_override_refuse_the_same() -> None:
    expected = "training.steps: 0 is out of range; give an integer of at least 1"
    with pytest.raises(ConfigError, match=expected):
        JobConfig.from_dict({"training": {"steps": 0}})
    with pytest.raises(ConfigError, match=expected):
        override(JobConfig.from_dict({}), {"training.steps": 0})


NAMES = st.sampled_from([*sorted(job_keys()), "model.dim", "model.num_kv_heads", "x"])
NAMES |= st.text(max_size=3).map(lambda text: f"model.{text}") | st.text(max_size=3)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates()
) | st.sampled_from(["op", "none", "SGD", "digits", "cifar", "memory_budget", "float64"])
BRANCHES = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.text(max_size=3), LEAVES)
VALUES = BRANCHES | st.lists(BRANCHES, max_size=2)


def tidy_problems_of(make: Callable[[], object]) -> None:
    """Runs `make`, which may raise ConfigError with different lines and nothing else."""
    try:
        make()
    except ConfigError as error:
        problems = error.problems
    else:
        return
    assert problems
    assert len(set(problems)) == len(problems)
    assert all(line.isprintable() for line in problems), problems


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_value_makes_a_job_or_one_line_for_each_mistake(values: dict[str, Any]) -> None:
    tidy_problems_of(lambda: override(JobConfig.from_dict({}), values))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NAMES, st.sampled_from(["=", " "]), st.text(max_size=8)), max_size=4))
def test_any_text_makes_a_job_or_one_line_for_each_mistake(texts: list[tuple[str, ...]]) -> None:
    argv = [f"--{name}{mark}{text}" for name, mark, text in texts if "file" not in name]
    words = [word for part in argv for word in part.split(" ", 1)]
    # Asking for help is no mistake and makes no job.
    words = [word for word in words if not word.startswith("-h") and not "--help".startswith(word)]
    tidy_problems_of(lambda: parse_args(words))


def test_a_table_that_cannot_run_is_named_by_its_file(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ConfigError) as caught:
        parse_args(
            [
                "--parallelism.pipeline_parallel_degree=2",
                f"--parallelism.pipeline_parallel_schedule_csv={table}",
                "--training.local_batch_size=2",
            ]
        )
    assert caught.value.problems == (
        f"parallelism.pipeline_parallel_schedule_csv: {table} deadlocks: rank 0 at 0B0, "
        "which waits for the backward of stage 1 for microbatch 0; rank 1 at 1F1, which waits for "
        "0F1; give a valid schedule",
    )
