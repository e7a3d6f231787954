"""Which backends torch.compile has; torch is imported only for one that is not in BACKENDS."""

from collections.abc import Iterator

from titanlite.errors import one_of, quote, suggest

# The backends of torch._dynamo.list_backends that need no further package.
BACKENDS = (
    *("inductor", "eager", "aot_eager", "aot_eager_decomp_partition"),
    *("aot_eager_default_partitioner", "cudagraphs", "eager_noexcept", "ts", "aot_ts"),
)


def backend_problems(name: str) -> Iterator[str]:
    """The problem if torch.compile has no backend `name`."""
    if name in BACKENDS:
        return
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        advice = suggest(name, BACKENDS, f"give {one_of(BACKENDS)}", quote)
        yield f"compile.backend: there is no backend {quote(name)}; {advice}"
