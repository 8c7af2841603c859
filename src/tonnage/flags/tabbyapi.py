"""TabbyAPI's command and its config.yml, for exllamav3.

Source:
    theroyallab/tabbyAPI ``common/config_models.py`` (ModelConfig, DraftModelConfig), ``common/args.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tonnage.errors import FlagsError, Problem, raise_if_any
from tonnage.flags.values import ConfigFile, ServeCommand, choice_problem, common_problems, kv_dtype_problems, unused
from tonnage.memory.cache_exllamav3 import PAGE_TOKENS, cache_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.draft import DraftMethod
    from tonnage.flags.values import ServePlan

CONFIG = "config.yml"
MODES: dict[DraftMethod, str] = {
    "draft-model": "model", "dflash": "model", "dflash2": "model", "mtp": "mtp", "ngram": "ngram",
}  # fmt: skip
"""Words of ``draft_model.draft_mode``."""


def tabbyapi_command(serve: ServePlan) -> ServeCommand:
    """Return the command and the config.yml it reads.

    Raises:
        FlagsError: TabbyAPI has no key for something, or refuses its value; all problems at once.
    """
    raise_if_any(FlagsError, _problems(serve))
    lines = ["model:", *_lines(_model_keys(serve))]
    if serve.draft is not None:
        lines += ["draft_model:", *_lines(_draft_keys(serve))]
    config = ConfigFile(name=CONFIG, lines=tuple(lines))
    return ServeCommand(words=("python", "main.py", "--config", CONFIG), files=(config,))


def _problems(serve: ServePlan) -> Iterator[Problem]:
    yield from common_problems(serve)
    yield from unused(serve, "TabbyAPI", "release", "kv_bytes", "fraction", "state_slots", "quantization", "eager")
    yield from _model_problems(serve)
    topology = serve.topology
    if topology.ep > 1 or topology.dcp > 1 or (topology.tp > 1 and topology.pp > 1):
        found = f"tp {topology.tp}, ep {topology.ep}, pp {topology.pp}, dcp {topology.dcp}"
        yield Problem(where="topology", what="exllamav3 cuts tensors or layers", expected="tp or pp alone", found=found)
    pages = {"prefill chunk": serve.prefill_chunk_tokens, "cache tokens": serve.kv_tokens}
    for name, tokens in pages.items():
        if tokens is not None and tokens % PAGE_TOKENS:
            yield Problem(where=name, what="no whole pages", expected="a multiple of 256", found=str(tokens))
    if serve.kv_tokens is None or serve.kv_tokens < serve.context_tokens:
        yield Problem(
            where="cache tokens", what="one request must fit", expected=f"at least {serve.context_tokens}",
            found=str(serve.kv_tokens),
        )  # fmt: skip
    if serve.page_tokens not in (None, PAGE_TOKENS):
        yield Problem(where="page tokens", what="fixed", expected="256", found=str(serve.page_tokens))
    yield from kv_dtype_problems(serve, cache_bits)


def _model_problems(serve: ServePlan) -> Iterator[Problem]:
    draft = serve.draft
    for where, model in (("model", serve.model), ("draft model", draft.model if draft is not None else None)):
        if model is not None and _split(model)[1] in ("", ".", ".."):
            yield Problem(where=where, what="TabbyAPI reads directories by name", expected="DIR/NAME", found=model)
    if draft is None:
        return
    if draft.method not in MODES:
        yield choice_problem("draft method", draft.method, tuple(MODES))


def cache_mode(kv_dtype: str) -> str:
    """Return ``model.cache_mode`` for a precision or one of TabbyAPI's own words: ``FP16``, or bits such as ``8,8``.

    Raises:
        UnknownFormatError: It is neither.
    """
    k_bits, v_bits = cache_bits(kv_dtype)
    return f"{k_bits},{v_bits}" if k_bits else "FP16"


def _model_keys(serve: ServePlan) -> dict[str, object]:
    directory, name = _split(serve.model)
    keys: dict[str, object] = {"model_dir": directory, "model_name": name, "backend": "exllamav3"}
    keys |= {"max_seq_len": serve.context_tokens, "cache_size": serve.kv_tokens}
    keys |= {"cache_mode": cache_mode(serve.kv_dtype), "chunk_size": serve.prefill_chunk_tokens}
    keys["max_batch_size"] = serve.concurrency
    if serve.topology.tp > 1:
        keys["tensor_parallel"] = True
    elif serve.topology.pp > 1:
        keys["gpu_split_auto"] = True
    return keys


def _draft_keys(serve: ServePlan) -> dict[str, object]:
    draft = serve.draft
    assert draft is not None
    keys: dict[str, object] = {"draft_mode": MODES[draft.method]}
    if draft.model is not None:
        keys["draft_model_dir"], keys["draft_model_name"] = _split(draft.model)
    keys["draft_num_tokens"] = draft.tokens
    return keys


def _split(model: str) -> tuple[str, str]:
    """Return the directory of models and the name of one in it; ``models`` is where TabbyAPI looks by itself."""
    directory, slash, name = model.rstrip("/").rpartition("/")
    return directory or ("/" if slash else "models"), name


def _lines(keys: dict[str, object]) -> list[str]:
    """Return keys as YAML: every value as JSON, which YAML reads alike."""
    return [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
