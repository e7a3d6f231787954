"""Every section and key of a job, with type, default and one line on what it does.

Names, meanings and defaults are those of TorchTitan v0.2.2; `torchtitan=` records its default
where titanlite's is another, OWN where it has no such key. `NotYet[...]` marks a key of
TorchTitan's that titanlite does not act on, so that only the default is accepted: removing that
one word makes the key live. `Inert[...]` marks one that only says more about such a feature: any
value is accepted, and named at the start. Sections that are missing as a whole stand in absent.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from titanlite.config.absent import (
    FaultTolerance,
    MemoryEstimation,
    MXLinear,
    QuantizedGroupedMM,
)
from titanlite.config.fields import (
    OWN,
    BlockIntervalOrOp,
    CountOrMinusOne,
    Dtype,
    Fraction,
    Inert,
    Name,
    NotYet,
    Section,
    Values,
    key,
)
from titanlite.data.catalog import DATASETS


class JobSection(Section):
    """What is run, and where its output goes"""

    config_file: str | None = key(None, "TOML file to read; the command line overrides it")
    dump_folder: Name = key("./outputs", "folder for everything the job writes")
    description: str = key("default job", "what this job shows, printed at its start")
    print_config: bool = key(False, "print the whole configuration before training")
    save_config_file: str | None = key(
        None, "file in dump_folder to write the whole configuration to, as TOML"
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto",
        "cuda with NCCL, cpu with gloo; auto: cuda where every rank has a GPU, else cpu",
        torchtitan=OWN,
    )
    max_local_ranks: PositiveInt | None = key(
        None,
        "most ranks that start on this machine; if not set, what its cores and memory allow",
        torchtitan=OWN,
    )
    custom_config_module: NotYet[str] = key(
        "",
        "module that extends the configuration",
        instead="name a module that registers your model in experimental.custom_import, or",
    )


class Profiling(Section):
    """Traces of what each rank does"""

    enable_profiling: bool = key(False, "write profiler traces, one file a rank, for Perfetto")
    save_traces_folder: Name = key("profile_traces", "folder in dump_folder for traces")
    profile_freq: PositiveInt = key(10, "steps from one trace to the next")
    profiler_active: PositiveInt = key(1, "steps in a trace")
    profiler_warmup: NonNegativeInt = key(3, "steps the profiler runs before it records")
    enable_pipeline_timeline: bool = key(
        False,
        "draw and trace what each pipeline rank did, every profile_freq steps",
        torchtitan=OWN,
    )
    enable_memory_snapshot: bool = key(False, "write snapshots of the CUDA allocator's history")
    save_memory_snapshot_folder: Name = key(
        "memory_snapshot", "folder in dump_folder for snapshots"
    )


class Metrics(Section):
    """Numbers logged during training"""

    log_freq: PositiveInt = key(10, "steps from one report to the next")
    enable_tensorboard: bool = key(False, "write TensorBoard files (extra: tensorboard)")
    disable_color_printing: bool = key(False, "print without colours")
    save_tb_folder: Name = key("tb", "folder in dump_folder for TensorBoard files")
    save_for_all_ranks: NotYet[bool] = key(
        False, "TensorBoard and W&B for every rank, not one alone"
    )
    enable_wandb: bool = key(False, "log to Weights & Biases (extra: wandb)")


class Model(Section):
    """The model; beside these keys, every field of the model's own configuration is one"""

    model_config = ConfigDict(extra="allow")

    name: str = key("image_transformer", "which model", torchtitan="llama3")
    flavor: str = key("digits", "a set of sizes: digits, cifar or debug", torchtitan="debugmodel")
    hf_assets_path: Inert[str] = key(
        "./tests/assets/tokenizer", "folder of Hugging Face assets, such as a tokenizer of text"
    )
    tokenizer_path: NotYet[str | None] = key(None, "tokenizer of text; later hf_assets_path")
    converters: Values[Literal["quantize.linear.float8"]] = key(
        (),
        "conversions of the model: linear layers to float8, by its section",
        lacking=("quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"),
    )
    print_after_conversion: NotYet[bool] = key(False, "print the model once converted")

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys that belong to the model's own configuration, as given."""
        return dict(self.model_extra or {})


class Optimizer(Section):
    """How weights follow gradients"""

    name: Literal["AdamW", "Adam", "SGD"] = key("AdamW", "which optimizer")
    lr: PositiveFloat = key(8e-4, "peak learning rate")
    beta1: float = key(0.9, "AdamW, Adam: decay of the gradient's average", ge=0, lt=1)
    beta2: float = key(0.95, "AdamW, Adam: decay of the squared gradient's average", ge=0, lt=1)
    eps: PositiveFloat = key(1e-8, "AdamW, Adam: added to the denominator")
    weight_decay: NonNegativeFloat = key(0.1, "weight decay")
    momentum: float = key(0.0, "SGD: momentum", torchtitan=OWN, ge=0, lt=1)
    implementation: Literal["fused", "foreach", "for-loop"] | None = key(
        None,
        "one kernel, kernels over lists, or tensor by tensor; fused if not set, SGD: foreach",
        torchtitan="fused",
    )
    early_step_in_backward: NotYet[bool] = key(False, "step each weight during the backward pass")

    @property
    def kernels(self) -> Literal["fused", "foreach", "for-loop"]:
        """The implementation, or what stands for none."""
        return self.implementation or ("foreach" if self.name == "SGD" else "fused")


class LRScheduler(Section):
    """Learning rate over the run: warm-up, plateau, decay"""

    warmup_steps: NonNegativeInt = key(
        200, "steps of linear warm-up, cut to the run; if not set, to what the decay leaves"
    )
    total_steps: PositiveInt | None = key(None, "length of the schedule; training.steps if not set")
    decay_ratio: Fraction | None = key(
        None,
        "share of the run that decays, cut to what warm-up leaves; if not set, all of that",
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "shape of the decay")
    min_lr_factor: Fraction = key(0.0, "the decay ends at this share of the learning rate")


class DataLoader(Section):
    """Worker processes of PyTorch's DataLoader"""

    num_workers: NotYet[NonNegativeInt] = key(0, "worker processes")
    persistent_workers: NotYet[bool] = key(False, "keep workers between epochs")
    pin_memory: NotYet[bool] = key(False, "copy batches into pinned memory")
    prefetch_factor: NotYet[PositiveInt | None] = key(None, "batches a worker loads ahead")


class Training(Section):
    """Data, batch, length and number formats of the run"""

    dataset: str = key("digits", f"data set: {', '.join(DATASETS)}", torchtitan="c4_test")
    dataset_path: str | None = key(None, "folder of a data set that is read from disk (cifar10)")
    local_batch_size: PositiveInt = key(8, "sequences a data-parallel rank takes at once")
    global_batch_size: CountOrMinusOne = key(
        -1,
        "sequences in a step, by accumulation where needed; -1: local_batch_size on every rank",
    )
    seq_len: PositiveInt | None = key(
        None,
        "tokens in a sequence; if not set the model's own length, else the data's, else 2048",
        torchtitan=2048,
    )
    max_norm: float = key(
        1.0, "gradients are clipped to this norm; inf: not clipped", gt=0, allow_inf_nan=True
    )
    steps: PositiveInt = key(10000, "optimizer steps to run")
    enable_cpu_offload: bool = key(
        False, "FSDP keeps parameters, gradients and optimizer state in CPU memory"
    )
    cpu_offload_pin_memory: bool = key(
        True,
        "pin offloaded memory where there is CUDA; false where CPU memory is short",
        torchtitan=OWN,
    )
    dtype: Dtype = key("float32", "number format of parameters, gradients and optimizer state")
    mixed_precision_param: Dtype | None = key(
        None, "number format of the computation; training.dtype if not set", torchtitan="bfloat16"
    )
    mixed_precision_reduce: Dtype | None = key(
        None, "number format of gradient reduction; training.dtype if not set", torchtitan="float32"
    )
    gc_freq: PositiveInt = key(50, "steps from one Python garbage collection to the next")
    gc_debug: bool = key(False, "collect garbage at every step and log what was found")
    dataloader: DataLoader = DataLoader()

    @property
    def param_dtype(self) -> Dtype:
        """Number format of the computation: mixed_precision_param, or dtype."""
        return self.mixed_precision_param or self.dtype

    @property
    def reduce_dtype(self) -> Dtype:
        """Number format of gradient reduction: mixed_precision_reduce, or dtype."""
        return self.mixed_precision_reduce or self.dtype


class Parallelism(Section):
    """How many ways each thing is split; the product is the number of ranks"""

    data_parallel_replicate_degree: PositiveInt = key(
        1, "copies of the weights (DDP; with a shard degree, HSDP)"
    )
    data_parallel_shard_degree: CountOrMinusOne = key(
        -1, "ways the weights are sharded (FSDP2); -1: all ranks the other degrees leave"
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", "whether FSDP frees gathered weights after forward, and gathers them again"
    )
    tensor_parallel_degree: PositiveInt = key(
        1, "ways heads and hidden units are split (TP), the sequence between them (SP)"
    )
    disable_loss_parallel: bool = key(False, "TP: gather the logits instead of splitting the loss")
    enable_async_tensor_parallel: bool = key(
        False, "TP: overlap its communication with matrix products"
    )
    async_tensor_parallel_backend: Literal["auto", "symmetric_memory", "ring"] = key(
        "auto",
        "async TP: symmetric_memory (GPUs, compiled) or ring (anywhere); auto: by device",
        torchtitan=OWN,
    )
    pipeline_parallel_degree: PositiveInt = key(1, "ways the blocks are split (PP)")
    module_fqns_per_model_part: Values[Values[str]] | None = key(
        None, "PP: the modules of each stage, by name"
    )
    pipeline_parallel_first_stage_less_layers: NonNegativeInt = key(
        1, "PP: blocks the first stage has less, for the embeddings"
    )
    pipeline_parallel_last_stage_less_layers: NonNegativeInt = key(
        1, "PP: blocks the last stage has less, for the output layer"
    )
    pipeline_parallel_layers_per_stage: PositiveInt | None = key(None, "PP: blocks a stage has")
    pipeline_parallel_schedule: str = key(
        "1F1B", "PP: which schedule, such as 1F1B, Interleaved1F1B, ZBVZeroBubble"
    )
    pipeline_parallel_schedule_csv: str = key(
        "", "PP: CSV file that holds a schedule, in place of it"
    )
    pipeline_parallel_microbatch_size: PositiveInt = key(1, "PP: sequences in a microbatch")
    pipeline_parallel_expert_parallel_overlap: Inert[bool] = key(
        True, "PP: overlap with the communication of experts"
    )
    context_parallel_degree: PositiveInt = key(1, "ways the sequence is split (CP)")
    context_parallel_load_balancer: Literal["headtail", "striped", "none"] = key(
        "headtail", "CP: which tokens a rank holds", lacking=("ptrr",)
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = key(
        "alltoall", "CP: keys and values gathered at once or passed round", torchtitan="allgather"
    )
    expert_parallel_degree: NotYet[PositiveInt] = key(1, "ways the experts are split (EP)")
    expert_tensor_parallel_degree: Inert[PositiveInt] = key(1, "TP degree within experts")
    expert_parallel_comm_backend: Inert[Literal["standard", "deepep"]] = key(
        "standard", "EP: which all-to-all"
    )

    def overlap_backend(self, device_type: str) -> Literal["symmetric_memory", "ring"] | None:
        """How tensor parallelism overlaps on that device; None where it is not asked to."""
        if not self.enable_async_tensor_parallel:
            return None
        if self.async_tensor_parallel_backend == "auto":
            return "symmetric_memory" if device_type == "cuda" else "ring"
        return self.async_tensor_parallel_backend


class ActivationCheckpoint(Section):
    """Activations recomputed in the backward pass instead of kept"""

    mode: Literal["selective", "full", "memory_budget", "none"] = key(
        "selective", "which: some, all, what compile finds for a budget, or none"
    )
    selective_ac_option: BlockIntervalOrOp = key(
        "2", '"n": every n-th block; "op": save listed operators\' outputs, recompute the rest'
    )
    per_op_sac_force_recompute_mm_shapes_by_fqns: Values[str] = key(
        ("moe.router.gate",), '"op": linear layers, by name, whose products are recomputed'
    )
    early_stop: bool = key(False, "stop recomputing once everything needed is there")
    memory_budget: Fraction = key(
        0.5, "memory_budget: 0 recomputes everything, 1 keeps what compile would keep"
    )
    visualize_memory_budget_pareto: NotYet[bool] = key(
        False, "memory_budget: draw time against memory"
    )
    preserve_rng_state: bool = key(True, "recompute with the random state of the first time")
    determinism_check: Literal["default", "none"] = key(
        "default", "compare shapes and types of recomputed tensors with the first, or not"
    )
    debug: bool = key(False, "record what was recomputed, for error messages (slow)")


class Compile(Section):
    """torch.compile"""

    enable: bool = key(False, "compile the components below")
    components: Values[Literal["model", "loss"]] = key(
        ("model", "loss"), "what is compiled: the model (block by block), the loss"
    )
    backend: Name = key("inductor", "which compiler")


class Float8Linear(Section):
    """Linear layers in float8: how, where model.converters names this section"""

    enable_fsdp_float8_all_gather: bool = key(
        False, "tensorwise: FSDP gathers the layers' weights in float8"
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = key(
        False, "find the scales of those at once, after each optimizer step"
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(
        None,
        "a scale a tensor (if not set) or a row; gw_hp: weight gradients in full precision",
    )
    filter_fqns: Values[Name] = key(
        (),
        "layers left as they are, by part of a name; auto_filter_small_kn: those too small",
    )
    emulate: bool = key(False, "use no float8 units, whatever the device has")

    @property
    def recipe(self) -> Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]:
        """The recipe's name, or what stands for none."""
        return self.recipe_name or "tensorwise"


class QuantizedLinear(Section):
    """Linear layers"""

    float8: Float8Linear = Float8Linear()
    mx: MXLinear = MXLinear()


class Quantize(Section):
    """Low-precision formats"""

    linear: QuantizedLinear = QuantizedLinear()
    grouped_mm: QuantizedGroupedMM = QuantizedGroupedMM()


class Checkpoint(Section):
    """Saving training state, and going on from it"""

    enable: bool = key(False, "save checkpoints, and go on from the newest one there is")
    folder: Name = key("checkpoint", "folder in dump_folder for checkpoints")
    interval: PositiveInt = key(500, "steps from one checkpoint to the next")
    initial_load_path: Name | None = key(
        None, "checkpoint to start from where the folder has none yet: its own folder, step-N"
    )
    initial_load_model_only: bool = key(True, "of that, load the weights alone")
    initial_load_in_hf: bool = key(
        False, "it is in Hugging Face's format: a .safetensors file, or a folder of them"
    )
    initial_load_in_hf_quantized: NotYet[bool] = key(False, "it is quantized")
    last_save_model_only: bool = key(True, "the last step's checkpoint holds the weights alone")
    last_save_in_hf: bool = key(False, "that one is a .safetensors file (Hugging Face's format)")
    export_dtype: Literal["float32", "float16", "bfloat16"] = key(
        "float32", "number format of the weights in a checkpoint that holds them alone"
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "save while training goes on, from a copy in memory; pinned: a lasting copy"
    )
    keep_latest_k: NonNegativeInt = key(10, "checkpoints kept; 0: all")
    load_step: int = key(-1, "step of the checkpoint to load; -1: the newest", ge=-1)
    exclude_from_loading: Values[
        Literal["optimizer", "lr_scheduler", "dataloader", "train_state"]
    ] = key((), "what is not loaded from a checkpoint; train_state is the step")
    enable_first_step_checkpoint: bool = key(False, "save after the first step too")
    create_seed_checkpoint: bool = key(False, "save the initial weights as step-0, and stop")
    load_only: bool = key(False, "load, never save; outputs go to load_only-N in dump_folder")
    enable_ft_dataloader_checkpoints: Inert[bool] = key(True, "data state of fault tolerance")

    @property
    def saves(self) -> bool:
        """Whether a run saves anything, and so has something to finish when it is stopped."""
        return self.enable and not self.load_only


class Comm(Section):
    """Communication between ranks"""

    init_timeout_seconds: PositiveInt = key(300, "longest wait up to the end of the first step")
    train_timeout_seconds: PositiveInt = key(100, "longest wait after it")
    checkpoint_timeout_seconds: PositiveInt = key(
        3600, "longest wait for each other's disks, in a save or a load", torchtitan=OWN
    )
    trace_buf_size: NonNegativeInt = key(
        20000, "collectives the flight recorder keeps, for reports and traces; 0: none"
    )
    save_traces_folder: Name = key(
        "comm_traces", "folder in dump_folder for the traces of a stuck run"
    )
    save_traces_file_prefix: Name = key("rank_", "how their names begin; the rank follows")
    mode: Literal["default", "debug"] = key(
        "default",
        '"debug": each step, compare what all ranks called, and from where',
        lacking=("fake_backend", "local_tensor"),
    )


class Validation(Section):
    """Loss on data that is not trained on"""

    enable: bool = key(False, "validate, every freq training steps")
    dataset: str | None = key(
        None, "data set; training.dataset's held-out part if not set", torchtitan="c4_validation"
    )
    dataset_path: str | None = key(None, "its folder; training.dataset_path if neither is set")
    local_batch_size: PositiveInt = key(8, "sequences a data-parallel rank takes at once")
    seq_len: PositiveInt | None = key(
        None, "tokens in a sequence; training.seq_len's, and no other", torchtitan=2048
    )
    freq: PositiveInt = key(10, "training steps from one validation to the next")
    steps: CountOrMinusOne = key(-1, "batches in a validation; -1: the whole set")
    dataloader: DataLoader = DataLoader()


class Debug(Section):
    """Randomness, and numbers that go wrong"""

    seed: int = key(
        0, "seed of weights, data order and sampling", torchtitan=None, ge=0, le=2**63 - 1
    )
    deterministic: bool = key(False, "deterministic algorithms only")
    deterministic_warn_only: bool = key(False, "where there is none, warn instead of stopping")
    non_finite: Literal["stop", "skip", "ignore"] = key(
        "stop",
        "where loss or gradient norm is not finite: stop before the update, skip it, or take it",
        torchtitan=OWN,
    )
    moe_force_load_balance: Inert[bool] = key(False, "tokens go to experts in turn")


class Experimental(Section):
    """Code from outside"""

    custom_import: str = key(
        "", 'module ("package.module") to import; it registers a model or a data set'
    )
    custom_args_module: NotYet[str] = key(
        "",
        "module that extends the configuration",
        instead="name a module that registers your model in experimental.custom_import, or",
    )


class Sampling(Section):
    """Sequences drawn from the trained model (titanlite's own section)"""

    num_samples: NonNegativeInt = key(16, "samples drawn at the end; 0: none", torchtitan=OWN)
    temperature: PositiveFloat = key(
        1.0, "below 1 likelier tokens, above 1 more varied ones", torchtitan=OWN
    )


class JobConfig(Section):
    """A whole job. Build one with load_config, make_config or override, which check it all."""

    job: JobSection = JobSection()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    sampling: Sampling = Sampling()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    debug: Debug = Debug()
    comm: Comm = Comm()
    experimental: Experimental = Experimental()
    quantize: Quantize = Quantize()
    memory_estimation: MemoryEstimation = MemoryEstimation()
    fault_tolerance: FaultTolerance = FaultTolerance()

    @property
    def converts_to_float8(self) -> bool:
        """Whether linear layers multiply in float8."""
        return "quantize.linear.float8" in self.model.converters

    @property
    def num_recorded_collectives(self) -> int:
        """What the flight recorder keeps: under "debug" all of it is read at each step."""
        size = self.comm.trace_buf_size
        return min(size, 2000) if self.comm.mode == "debug" else size

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in steps."""
        return self.lr_scheduler.total_steps or self.training.steps

    def validates_after(self, step: int) -> bool:
        """Whether the run validates after `step`: by interval, and after the last."""
        is_due = step % self.validation.freq == 0 or step == self.training.steps
        return self.validation.enable and is_due

    @property
    def decay_steps(self) -> int:
        """Steps of learning-rate decay at the end of the schedule, cut to what warm-up leaves."""
        room = self.schedule_steps - self.warmup_steps
        ratio = self.lr_scheduler.decay_ratio
        return room if ratio is None else min(round(self.schedule_steps * ratio), room)

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, cut to the schedule, as TorchTitan does.

        A warm-up that the job does not set also leaves room for the decay that it does set.
        """
        room = self.schedule_steps
        ratio = self.lr_scheduler.decay_ratio
        if ratio is not None and "warmup_steps" not in self.lr_scheduler.model_fields_set:
            room -= round(self.schedule_steps * ratio)
        return min(self.lr_scheduler.warmup_steps, room)

    @property
    def validation_dataset(self) -> str:
        """The data set to validate on."""
        return self.validation.dataset or self.training.dataset

    @property
    def validation_dataset_path(self) -> str | None:
        """Its folder, for a data set that is read from disk."""
        if self.validation.dataset is None or self.validation.dataset == self.training.dataset:
            return self.validation.dataset_path or self.training.dataset_path
        return self.validation.dataset_path
