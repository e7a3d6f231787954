"""Every section and key of a job, with type, default and one line of text.

Names, meanings and defaults are those of TorchTitan v0.2.2. `torchtitan=` is TorchTitan's default
if titanlite's differs; an `extra_key` is one that TorchTitan does not have. `NotYet[...]` marks a
TorchTitan key that titanlite does not support: only the default is accepted. `Inert[...]` marks a
key that only configures such a feature: any value is accepted, and reported at the start. Sections
without any supported key are in absent.py.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
)

from titanlite.config.absent import FaultTolerance, MXLinear, QuantizedGroupedMM
from titanlite.fields import (
    BatchSizes,
    CountOrMinusOne,
    Dtype,
    Fraction,
    Inert,
    Multipliers,
    Name,
    NotYet,
    Section,
    Values,
    extra_key,
    key,
)
from titanlite.parallelize.activation_checkpoint.spec import ActivationCheckpoint
from titanlite.parallelize.async_tensor_parallel.spec import AsyncTensorParallelKeys
from titanlite.parallelize.compile.spec import Compile
from titanlite.parallelize.context_parallel.spec import ContextParallelKeys
from titanlite.parallelize.expert_parallel.spec import ExpertParallelKeys
from titanlite.parallelize.fsdp.spec import DataParallelKeys
from titanlite.parallelize.lora.spec import LoRA
from titanlite.parallelize.pipeline_parallel.spec import PipelineParallelKeys
from titanlite.parallelize.steps import FEATURES
from titanlite.parallelize.tensor_parallel.spec import TensorParallelKeys
from titanlite.registry import DATASETS

S = TypeVar("S", bound=Section)
SECTIONS = {kind: name for one in FEATURES for name, kind in one.sections.items()}
"""The features' own sections: class -> full name."""
if TYPE_CHECKING:
    Converter: TypeAlias = str
else:
    Converter = Literal[tuple(one.converter for one in FEATURES if one.converter)]


def with_features(parent: str = "") -> Callable[[type[S]], type[S]]:
    """Add to a section, by its full name, the features' own sections that it does not declare."""

    def add(section: type[S]) -> type[S]:
        fields: dict[str, Any] = {}
        for kind, name in SECTIONS.items():
            above, _, leaf = name.rpartition(".")
            if above == parent and leaf not in section.model_fields:
                fields[leaf] = (kind, kind())
        if not fields:
            return section
        made: type[S] = create_model(
            section.__name__,
            __base__=section,
            __doc__=section.__doc__,
            __module__=section.__module__,
            **fields,
        )
        return made

    return add


class JobSection(Section):
    """The job's description, output folder and device"""

    config_file: str | None = key(None, "TOML file to read; the command line overrides it")
    dump_folder: Name = key("./outputs", "folder for everything the job writes")
    description: str = key("default job", "description, printed at the start")
    print_config: bool = key(False, "print the whole configuration before training")
    save_config_file: str | None = key(
        None, "file in dump_folder for the whole configuration, as TOML"
    )
    device: Literal["auto", "cpu", "cuda"] = extra_key(
        "auto", "cuda with NCCL, or cpu with gloo; auto: cuda if every rank has a GPU, else cpu"
    )
    max_local_ranks: PositiveInt | None = extra_key(
        None, "limit on ranks on this machine; if not set, it depends on cores and memory"
    )
    max_local_memory_gb: PositiveFloat | None = extra_key(
        None, "limit on the memory of CPU ranks on this machine; if not set, its memory and swap"
    )
    custom_config_module: NotYet[str] = key(
        "",
        "module that extends the configuration",
        instead="name a module that registers your model in experimental.custom_import, or",
    )


class Profiling(Section):
    """Profiler traces and memory snapshots"""

    enable_profiling: bool = key(False, "write profiler traces, one file per rank, for Perfetto")
    save_traces_folder: Name = key("profile_traces", "folder in dump_folder for traces")
    profile_freq: PositiveInt = key(10, "steps between traces")
    profiler_active: PositiveInt = key(1, "steps in a trace")
    profiler_warmup: NonNegativeInt = key(3, "steps that the profiler runs before it records")
    enable_pipeline_timeline: bool = extra_key(
        False, "draw and trace the actions of each pipeline rank, every profile_freq steps"
    )
    enable_memory_snapshot: bool = key(False, "write snapshots of the CUDA allocator's history")
    save_memory_snapshot_folder: Name = key(
        "memory_snapshot", "folder in dump_folder for snapshots"
    )


class Metrics(Section):
    """Numbers logged during training"""

    log_freq: PositiveInt = key(10, "steps between reports")
    verbose: bool = extra_key(False, "print all of first_screen.txt at the start, not a brief form")
    enable_tensorboard: bool = key(False, "write TensorBoard files (needs the extra tensorboard)")
    disable_color_printing: bool = key(False, "print without colours")
    save_tb_folder: Name = key("tb", "folder in dump_folder for TensorBoard files")
    save_for_all_ranks: NotYet[bool] = key(
        False, "TensorBoard and W&B for every rank instead of one"
    )
    enable_wandb: bool = key(False, "log to Weights & Biases (needs the extra wandb)")


class Model(Section):
    """The model, with the keys of its own configuration"""

    model_config = ConfigDict(extra="allow")

    name: str = key("image_transformer", "name of the model", torchtitan="llama3")
    flavor: str | None = key(
        None, "set of sizes of the model; default: its first", torchtitan="debugmodel"
    )
    hf_assets_path: str | None = key(
        None,
        "folder of the text tokenizer, a tokenizer.json; if not set or empty, tokens are bytes",
        torchtitan="./tests/assets/tokenizer",
    )
    tokenizer_path: NotYet[str | None] = key(None, "text tokenizer; replaced by hf_assets_path")
    converters: "Values[Converter]" = key(
        (),
        "conversions of the model, each by the name of its section",
        lacking=("quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"),
    )
    print_after_conversion: NotYet[bool] = key(False, "print the converted model")

    @property
    def overrides(self) -> dict[str, Any]:
        """The given keys of the model's own configuration."""
        return dict(self.model_extra or {})


class Optimizer(Section):
    """The optimizer"""

    name: str = key("AdamW", "AdamW, Adam, SGD, Muon (with AdamW), or a registered optimizer")
    lr: PositiveFloat = key(8e-4, "peak learning rate")
    beta1: float = key(0.9, "AdamW, Adam: decay rate of the gradient's moving average", ge=0, lt=1)
    beta2: float = key(
        0.95, "AdamW, Adam: decay rate of the squared gradient's moving average", ge=0, lt=1
    )
    eps: PositiveFloat = key(1e-8, "AdamW, Adam: added to the denominator")
    weight_decay: NonNegativeFloat = key(0.1, "weight decay")
    no_weight_decay: Values[Name] = extra_key(
        (), "patterns of the names of parameters that do not decay, such as output.*"
    )
    lr_multipliers: Multipliers = extra_key(
        {},
        "pattern of parameter names -> factor on the learning rate; the first that matches counts",
    )
    momentum: float | None = extra_key(
        None, "SGD, Muon: momentum; default: 0, Muon: 0.95", ge=0, lt=1
    )
    nesterov: bool = extra_key(True, "Muon: Nesterov's momentum")
    ns_steps: int = extra_key(5, "Muon: steps of Newton-Schulz", ge=1, lt=100)
    ns_dtype: Dtype = extra_key(
        "bfloat16", "Muon: dtype of Newton-Schulz; titanlite verify uses its own"
    )
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = extra_key(
        "match_rms_adamw",
        "Muon: updates as large as AdamW's, for one lr; or original, torch's default",
    )
    adamw: Values[Name] = extra_key(
        (), "Muon: patterns of the matrices that AdamW updates; if empty, those outside the blocks"
    )
    implementation: Literal["fused", "foreach", "for-loop"] | None = key(
        None,
        "one kernel, kernels over lists, or one tensor at a time; default: fused, SGD: foreach",
        torchtitan="fused",
    )
    early_step_in_backward: NotYet[bool] = key(False, "update each weight during the backward pass")

    @property
    def used_momentum(self) -> float:
        """The momentum, with its default resolved."""
        default = 0.95 if self.name == "Muon" else 0.0
        return default if self.momentum is None else self.momentum

    @property
    def kernels(self) -> Literal["fused", "foreach", "for-loop"]:
        """The implementation, with its default resolved."""
        return self.implementation or ("foreach" if self.name == "SGD" else "fused")


class WeightAveraging(Section):
    """An average of the weights, which is validated and exported instead of them"""

    method: Literal["none", "ema", "last_k"] = extra_key(
        "none", "an exponential moving average, or the mean of the last k weights"
    )
    decay: float = extra_key(0.999, "ema: the average's share of its next value", ge=0, lt=1)
    k: PositiveInt = extra_key(5, "last_k: how many weights; each takes the memory of a copy")
    freq: PositiveInt = extra_key(1, "steps between the weights that are averaged")
    start_step: PositiveInt = extra_key(1, "first step whose weights are averaged")

    @property
    def num_copies(self) -> int:
        """The tensors that it keeps for each weight."""
        return {"none": 0, "ema": 1, "last_k": self.k + 1}[self.method]


class LRScheduler(Section):
    """The learning rate schedule: warm-up, plateau, decay"""

    warmup_steps: NonNegativeInt = key(
        200, "steps of linear warm-up, cut to the run; if not set, also cut to leave decay_ratio"
    )
    total_steps: PositiveInt | None = key(None, "length of the schedule; training.steps if not set")
    decay_ratio: Fraction | None = key(
        None,
        "fraction of the run that decays, cut to the steps after warm-up; if not set, all these",
    )
    decay_type: str = key("linear", "linear, sqrt, cosine, or a registered schedule")
    min_lr_factor: Fraction = key(0.0, "the decay ends at this fraction of the peak learning rate")


class DataLoader(Section):
    """Worker processes of PyTorch's DataLoader"""

    num_workers: NotYet[NonNegativeInt] = key(0, "worker processes")
    persistent_workers: NotYet[bool] = key(False, "keep workers between epochs")
    pin_memory: NotYet[bool] = key(False, "copy batches into pinned memory")
    prefetch_factor: NotYet[PositiveInt | None] = key(None, "batches that a worker loads ahead")


NAMES = [name for name in DATASETS if not name.endswith("_validation")]


class Training(Section):
    """Data set, batch, sequence length, steps and dtypes"""

    loss: str | None = extra_key(None, "registered loss; default: that of the data set")
    label_smoothing: float = extra_key(0.0, "share of targets spread evenly", ge=0, lt=1)
    z_loss: float = extra_key(0.0, "adds this x log(sum(exp(logits)))^2", ge=0)
    dataset: str = key("digits", f"one of {', '.join(NAMES)}", torchtitan="c4_test")
    dataset_path: str | None = key(
        None, "its file, folder, or name on the Hub (text, tokens, hf, c4, c4_test, cifar10)"
    )
    attend_across_documents: bool = extra_key(
        True, "text: whether tokens attend to earlier documents of their sequence"
    )
    local_batch_size: PositiveInt = key(8, "sequences per data-parallel rank and accumulation step")
    global_batch_size: CountOrMinusOne = key(
        -1, "sequences per step, accumulated if needed; -1: local_batch_size x data-parallel degree"
    )
    batch_size_schedule: BatchSizes = extra_key(
        (), "[step, sequences]: another global_batch_size from each of these steps"
    )
    seq_len: PositiveInt | None = key(
        None,
        "tokens per sequence; if not set, the model's own length, else the data's, else 2048",
        torchtitan=2048,
    )
    prefetch: bool = extra_key(
        True, "read samples a step ahead, on a thread; not if they draw randomly"
    )
    max_norm: float = key(
        1.0, "clip gradients to this norm; inf: no clipping", gt=0, allow_inf_nan=True
    )
    steps: PositiveInt = key(10000, "number of optimizer steps")
    enable_cpu_offload: bool = key(
        False, "FSDP: keep parameters, gradients and optimizer state in CPU memory"
    )
    cpu_offload_pin_memory: bool = extra_key(
        True, "on CUDA, pin the offloaded memory; false if CPU memory is short"
    )
    dtype: Dtype = key("float32", "dtype of parameters, gradients and optimizer state")
    mixed_precision_param: Dtype | None = key(
        None, "dtype of the computation; training.dtype if not set", torchtitan="bfloat16"
    )
    mixed_precision_reduce: Dtype | None = key(
        None, "dtype of gradient reduction; training.dtype if not set", torchtitan="float32"
    )
    gc_freq: PositiveInt = key(50, "steps between Python garbage collections")
    gc_debug: bool = key(False, "collect garbage at every step and log the number of objects found")
    dataloader: DataLoader = DataLoader()

    @property
    def param_dtype(self) -> Dtype:
        """The dtype of the computation: mixed_precision_param, or dtype."""
        return self.mixed_precision_param or self.dtype

    @property
    def reduce_dtype(self) -> Dtype:
        """The dtype of gradient reduction: mixed_precision_reduce, or dtype."""
        return self.mixed_precision_reduce or self.dtype

    @property
    def is_mixed(self) -> bool:
        """Whether computation or reduction has another dtype than the parameters."""
        return {self.param_dtype, self.reduce_dtype} != {self.dtype}


class Parallelism(
    # pydantic orders the keys from the last base to the first.
    ExpertParallelKeys,
    ContextParallelKeys,
    PipelineParallelKeys,
    AsyncTensorParallelKeys,
    TensorParallelKeys,
    DataParallelKeys,
):
    """The degree of each parallelism"""


@with_features("quantize.linear")
class QuantizedLinear(Section):
    """Linear layers"""

    mx: MXLinear = MXLinear()


class Quantize(Section):
    """Low-precision formats"""

    linear: QuantizedLinear = QuantizedLinear()
    grouped_mm: QuantizedGroupedMM = QuantizedGroupedMM()


class Checkpoint(Section):
    """Saving checkpoints and resuming"""

    enable: bool = key(False, "save checkpoints, and resume from the newest one")
    folder: Name = key("checkpoint", "folder in dump_folder for checkpoints")
    interval: PositiveInt = key(500, "steps between checkpoints")
    initial_load_path: Name | None = key(
        None, "checkpoint (its step-N folder) to start from if checkpoint.folder has none"
    )
    initial_load_model_only: bool = key(True, "load only the weights from initial_load_path")
    initial_load_in_hf: bool = key(
        False,
        "initial_load_path is a Hugging Face folder, or a .safetensors file or a folder of them",
    )
    initial_load_in_hf_quantized: NotYet[bool] = key(False, "the .safetensors file is quantized")
    last_save_model_only: bool = key(True, "save only the weights at the last step")
    last_save_in_hf: bool = key(
        False, "save the last step's weights as a Hugging Face folder, or a .safetensors file"
    )
    export_dtype: Literal["float32", "float16", "bfloat16"] = key(
        "float32", "dtype of the weights in a checkpoint that has only weights"
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "save in the background from a staged copy; pinned: reuse pinned staging memory"
    )
    keep_latest_k: NonNegativeInt = key(10, "number of checkpoints to keep; 0: all")
    load_step: int = key(-1, "step of the checkpoint to load; -1: the newest", ge=-1)
    exclude_from_loading: Values[
        Literal["optimizer", "lr_scheduler", "dataloader", "train_state"]
    ] = key((), "state not to load from a checkpoint; train_state is the step")
    enable_first_step_checkpoint: bool = key(False, "save after the first step too")
    create_seed_checkpoint: bool = key(False, "save the initial weights as step-0, then exit")
    load_only: bool = key(False, "load but never save; outputs go to load_only-N in dump_folder")
    enable_ft_dataloader_checkpoints: Inert[bool] = key(
        True, "data loader checkpoints for fault tolerance"
    )

    @property
    def saves(self) -> bool:
        """Whether a run saves checkpoints, and so finishes a step and saves when it is stopped."""
        return self.enable and not self.load_only


class Comm(Section):
    """Communication between ranks"""

    init_timeout_seconds: PositiveInt = key(300, "timeout until the end of the first step")
    train_timeout_seconds: PositiveInt = key(100, "timeout after the first step")
    checkpoint_timeout_seconds: PositiveInt = extra_key(
        3600, "timeout of a save or a load, which wait for every rank's disk"
    )
    trace_buf_size: NonNegativeInt = key(
        20000, "collectives that the flight recorder keeps, for reports and traces; 0: none"
    )
    save_traces_folder: Name = key(
        "comm_traces", "folder in dump_folder for the traces of a hanging run"
    )
    save_traces_file_prefix: Name = key(
        "rank_", "file names of these traces: this prefix, then the rank"
    )
    mode: Literal["default", "debug", "threads", "local_tensor"] = key(
        "default",
        '"debug": compare the calls of ranks at each step; "threads": ranks in one process',
        lacking=("fake_backend",),
    )

    @property
    def has_threads(self) -> bool:
        """Whether the ranks are threads of one process."""
        return self.mode in ("threads", "local_tensor")


class Validation(Section):
    """The loss on held-out data"""

    enable: bool = key(False, "validate every freq training steps")
    dataset: str | None = key(
        None,
        "data set, also hf_validation or c4_validation; training's held-out part if not set",
        torchtitan="c4_validation",
    )
    dataset_path: str | None = key(None, "its folder; training.dataset_path if neither key is set")
    local_batch_size: PositiveInt = key(8, "sequences per forward pass on a data-parallel rank")
    seq_len: PositiveInt | None = key(
        None, "tokens per sequence; only the training length is accepted", torchtitan=2048
    )
    freq: PositiveInt = key(10, "training steps between validations")
    steps: CountOrMinusOne = key(-1, "global batches per validation; -1: the whole data set")
    metrics: Values[Name] = extra_key(
        (), "registered metrics to compute besides the loss, such as accuracy"
    )
    dataloader: DataLoader = DataLoader()


class Debug(Section):
    """Randomness, and non-finite losses"""

    seed: int = key(
        0, "seed of weights, data order, noise and sampling", torchtitan=None, ge=0, le=2**63 - 1
    )
    deterministic: bool = key(False, "use only deterministic algorithms")
    deterministic_warn_only: bool = key(
        False, "warn, instead of stopping, if an operation has no deterministic algorithm"
    )
    non_finite: Literal["stop", "skip", "ignore"] = extra_key(
        "stop",
        "if loss or gradient norm is not finite: stop before the update, skip it, or apply it",
    )
    check_copies: bool = extra_key(
        True, "compare copies of tensors at the start, after step 1 and before a checkpoint"
    )
    moe_force_load_balance: bool = key(
        False, "assign the tokens of a sequence to experts in turn, whatever their scores"
    )


class Experimental(Section):
    """User modules"""

    custom_import: str = key("", 'module ("package.module") that registers a model or a data set')
    custom_args_module: NotYet[str] = key(
        "",
        "module that extends the configuration",
        instead="name a module that registers your model in experimental.custom_import, or",
    )


class Sampling(Section):
    """Samples drawn from the trained model (not in TorchTitan)"""

    num_samples: NonNegativeInt = extra_key(16, "number of samples to draw at the end; 0: none")
    temperature: NonNegativeFloat = extra_key(
        1.0, "below 1: likelier tokens; above 1: more varied ones; 0: always the likeliest"
    )
    top_k: PositiveInt | None = extra_key(
        None, "sample only from the top_k likeliest tokens; if not set, from all"
    )
    top_p: float = extra_key(
        1.0, "sample only from the likeliest tokens that together have this probability", gt=0, le=1
    )
    prompt: str = extra_key("", "text that the samples continue")
    num_tokens: PositiveInt | None = extra_key(
        None, "tokens of a sample, including the prompt; if not set, those of a training sequence"
    )


class MemoryEstimation(Section):
    """Estimating a job's memory without running it"""

    enable: bool = key(False, "print the memory of a step by its plan, and stop")
    disable_fake_mode: Inert[bool] = key(False, "estimate with real tensors")


@with_features()
class JobConfig(Section):
    """A whole job. Build one with load_config or JobConfig.from_dict, which run all checks."""

    job: JobSection = JobSection()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    weight_averaging: WeightAveraging = WeightAveraging()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    lora: LoRA = LoRA()
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]]) -> "JobConfig":
        """The job with these values: a dict from section to a dict from key to value.

        The values have TOML's types, and are checked like a file's. Raises ConfigError with one
        line for each mistake.
        """
        from titanlite.config.load import checked, read_any

        return checked(read_any(values))

    def section(self, kind: type[S]) -> S:
        """The section of a feature, by its class."""
        part: Any = self
        for name in SECTIONS[kind].split("."):
            part = getattr(part, name)
        assert isinstance(part, kind)
        return part

    @property
    def num_recorded_collectives(self) -> int:
        """How many collectives the flight recorder keeps.

        At most 2,000 with comm.mode "debug", which reads all of them at each step.
        """
        size = self.comm.trace_buf_size
        return min(size, 2000) if self.comm.mode == "debug" else size

    @property
    def schedule_steps(self) -> int:
        """Length of the learning rate schedule in steps."""
        return self.lr_scheduler.total_steps or self.training.steps

    def validates_after(self, step: int) -> bool:
        """Whether the run validates after `step`: every `freq` steps, and after the last step."""
        is_due = step % self.validation.freq == 0 or step == self.training.steps
        return self.validation.enable and is_due

    @property
    def decay_steps(self) -> int:
        """Steps of decay at the end of the schedule, at most the steps after warm-up."""
        room = self.schedule_steps - self.warmup_steps
        ratio = self.lr_scheduler.decay_ratio
        return room if ratio is None else min(round(self.schedule_steps * ratio), room)

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, at most the length of the schedule, as in TorchTitan.

        If the job sets decay_ratio but not warmup_steps, the default is shortened, if necessary, so
        that the warm-up ends before the decay starts.
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
        """The folder of the validation data set, if it is read from disk."""
        if self.validation.dataset is None or self.validation.dataset == self.training.dataset:
            return self.validation.dataset_path or self.training.dataset_path
        return self.validation.dataset_path
