"""What vLLM's own classes say about the cache of one rank: pages, groups, bytes of a block, tokens, longest context.

Real are every layer's cache spec, the alignment of hybrid models, the grouping, the pool and its capacity. Given are the
block size a GPU's backend would ask for and the layout of the pool: the backend of a CPU has rules of its own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import vllm_classes
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec
from vllm_classes import Rank, Refused

BUDGET_BYTES = 40 << 30
LAYOUTS = {False: "LBNHC", True: "BLHNC"}


class _Draft:
    """A speculative config that says how many tokens are proposed, and no or nothing to every other question."""

    def __init__(self, tokens: int) -> None:
        self.num_speculative_tokens = tokens
        self.method = "mtp"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *_args: False) if name.startswith(("use", "is_", "needs")) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about one config.

    Attributes:
        tp: Tensor-parallel size.
        dcp: Decode-context-parallel size.
        kv_dtype: vLLM's name of a KV dtype.
        context_tokens: Longest context.
        block_tokens: Block a GPU's backend asks for.
        kernel_block_tokens: Smallest block of its kernels.
        prefix_caching: Whether it is on.
        draft_tokens: Tokens proposed per step.
        draft_layers: Layers of a draft, each with the attention of the target's last such layer.
        packed: Layers stand side by side in a block.
    """

    tp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"
    context_tokens: int = 131072
    block_tokens: int = 16
    kernel_block_tokens: int = 16
    prefix_caching: bool = False
    draft_tokens: int = 0
    draft_layers: int = 0
    packed: bool = False


def answer(config: Mapping[str, Any], question: Question) -> dict[str, Any]:
    """Return vLLM's figures, with the question.

    Raises:
        Refused: vLLM does not build the model, or has no pool for it.
    """
    longest = config.get("text_config", config).get("max_position_embeddings") or question.context_tokens
    context = min(question.context_tokens, longest)
    try:
        engine, specs = _specs(config, question, context)
        engine.cache_config.kv_cache_layout = LAYOUTS[question.packed]
        pool = _pool(engine, specs)
    except (ArithmeticError, AssertionError, NotImplementedError, ValueError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    return {**asdict(question), "context_tokens": context, **pool}


def stage_bytes(config: Mapping[str, Any], question: Question, pp: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the tokens in flight, and of every pipeline stage the bytes of a block and those of one request.

    A draft's layers, which a question may have, are on the last stage.

    Raises:
        Refused: vLLM does not build the model, or has no pool for it.
    """
    try:
        found = [_specs(config, question, question.context_tokens, pp=pp, stage=stage) for stage in range(pp)]
        engine = found[-1][0]
        engine.cache_config.kv_cache_layout = LAYOUTS[question.packed]
        groups = kv_cache_utils.get_kv_cache_groups(
            engine, {name: spec for _, own in found for name, spec in own.items()}
        )
    except (ArithmeticError, AssertionError, NotImplementedError, ValueError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    here = [kv_cache_utils._project_kv_cache_groups_to_worker(groups, own) for _, own in found]
    return engine.max_in_flight_tokens, [
        (
            kv_cache_utils._pool_bytes_per_block(engine, mine),
            kv_cache_utils._max_memory_usage_bytes_from_groups(engine, mine),
        )
        for mine in here
    ]


def _specs(
    config: Mapping[str, Any], question: Question, context: int, *, pp: int = 1, stage: int = 0
) -> tuple[VllmConfig, dict[str, KVCacheSpec]]:
    with tempfile.TemporaryDirectory() as folder:
        vllm_classes.write_config(Path(folder), config)
        engine = _engine(folder, question, context)
        engine.parallel_config.pipeline_parallel_size = pp
        with _gpu_backend(engine, question) as backend:
            if engine.model_config.is_hybrid:
                _align(engine, backend)
            vllm_classes.build_rank(engine, Rank(tp=question.tp, pp=pp, rank=stage * question.tp))
            specs = _layer_specs(engine)
    if stage < pp - 1:
        return engine, specs
    attention = [spec for spec in specs.values() if isinstance(spec, AttentionSpec)]
    specs |= {f"draft.{i}": attention[-1] for i in range(question.draft_layers)}
    return engine, specs


def _layer_specs(engine: VllmConfig) -> dict[str, KVCacheSpec]:
    layers = engine.compilation_config.static_forward_context
    with set_current_vllm_config(engine):
        specs = {name: layer.get_kv_cache_spec(engine) for name, layer in layers.items() if _keeps(layer)}
    return {name: _customized(layers[name], spec) for name, spec in specs.items() if spec is not None}


def _keeps(layer: Any) -> bool:
    return hasattr(layer, "get_kv_cache_spec") and not getattr(layer, "kv_sharing_target_layer_name", None)


def _customized(layer: Any, spec: KVCacheSpec) -> KVCacheSpec:
    """Return a spec as a GPU's backend packs it: the CPU's has no modes of its own."""
    if not isinstance(spec, AttentionSpec):
        return spec
    own = layer.get_attn_backend()
    return own.customize_spec(spec) if own.is_mla() else _packed(spec)


def _packed(spec: AttentionSpec) -> AttentionSpec:
    mode = spec.kv_quant_mode
    if mode.is_per_token_head:
        return AttentionBackendEnum.TRITON_ATTN.get_class().customize_spec(spec)
    if mode.is_nvfp4:  # as FlashInfer's backend does it, which cannot be imported without FlashInfer
        full = nvfp4_kv_cache_full_dim(spec.head_size)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=full)
    return spec


def _engine(folder: str, question: Question, context: int) -> VllmConfig:
    engine = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=question.tp,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=context,
        max_num_batched_tokens=8192,
        kv_cache_dtype=question.kv_dtype,
        block_size=question.block_tokens,
        enable_prefix_caching=False,
    ).create_engine_config()
    engine.parallel_config.decode_context_parallel_size = question.dcp
    cache = engine.cache_config
    cache.block_size = question.block_tokens
    if engine.model_config.is_hybrid:  # a CPU turns prefix caching off where latents are kept
        cache.enable_prefix_caching = question.prefix_caching
        cache.mamba_cache_mode = "align" if question.prefix_caching else "none"
        cache.mamba_block_size = question.block_tokens if question.prefix_caching else context
    if question.draft_tokens:
        engine.speculative_config = _Draft(question.draft_tokens)
    return engine


@contextlib.contextmanager
def _gpu_backend(engine: VllmConfig, question: Question) -> Iterator[type]:
    """Give the CPU's attention backend the block sizes and the packing of a GPU's."""
    name = AttentionBackendEnum.CPU_MLA if engine.model_config.use_mla else AttentionBackendEnum.CPU_ATTN
    backend = name.get_class()
    kernels = [MultipleOf(question.kernel_block_tokens)]
    given = {"get_supported_kernel_block_sizes": staticmethod(lambda *_spec: kernels)}
    if not engine.model_config.use_mla:
        given["customize_spec"] = staticmethod(_packed)
    own = {method: backend.__dict__[method] for method in given if method in backend.__dict__}
    for method, function in given.items():
        setattr(backend, method, function)
    try:
        yield backend
    finally:
        for method in given:
            delattr(backend, method)
        for method, function in own.items():
            setattr(backend, method, function)


def _align(engine: VllmConfig, backend: type) -> None:
    """Align a hybrid's pages as any platform does, with this backend."""
    platform = type(current_platform)
    finder = platform.__dict__.get("_find_non_ssm_backends")
    platform._find_non_ssm_backends = classmethod(lambda *_args: [backend])
    try:
        Platform._align_hybrid_block_size.__func__(platform, engine, backend)
    finally:
        del platform._find_non_ssm_backends
        if finder is not None:
            platform._find_non_ssm_backends = finder


def _pool(engine: VllmConfig, specs: dict[str, KVCacheSpec]) -> dict[str, Any]:
    groups = kv_cache_utils.get_kv_cache_groups(engine, dict(specs))
    config = kv_cache_utils.get_kv_cache_config_from_groups(engine, groups, BUDGET_BYTES)
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(engine, config)
    half = kv_cache_utils._max_memory_usage_bytes_from_groups(engine, groups) // 2
    return {
        "in_flight_tokens": engine.max_in_flight_tokens,
        "block_size": engine.cache_config.block_size,
        "pages": sorted(
            [count, *page] for page, count in Counter((_kind(s), s.page_size_bytes) for s in specs.values()).items()
        ),
        "groups": sorted([len(g.layer_names), g.kv_cache_spec.block_size * (not _is_state(g))] for g in groups),
        "bytes_per_block": kv_cache_utils._pool_bytes_per_block(engine, groups),
        "num_blocks": config.num_blocks,
        "tokens": tokens,
        "request_blocks": round(config.num_blocks / concurrency),
        "needed_bytes": kv_cache_utils._max_memory_usage_bytes_from_groups(engine, groups),
        "half_bytes": half,
        "half_context": kv_cache_utils._estimate_max_model_len_from_groups(engine, groups, half),
    }


def _kind(spec: KVCacheSpec) -> str:
    return type(spec).__name__


def _is_state(group: Any) -> bool:
    return isinstance(group.kv_cache_spec, MambaSpec)
