"""Both models on the CPU, one after the other, with transformers: perplexity, divergence, agreement of tokens.

Weights are made BF16 in memory by the same code for a checkpoint and for the ranks of a package, and computed with in
float32, so that nothing but their values makes a difference. Nothing of a checkpoint is executed, nothing fetched.
torch and transformers are imported here alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.compare.answers import Agreement, EndToEnd
from tonnage.compare.model import CONFIG, Model
from tonnage.compare.texts import TEXT_TITLE, shipped_text, text_digest
from tonnage.compare.wholes import CompareError
from tonnage.compare.windows import bf16_bits, stored_bits, windows
from tonnage.errors import Problem, one_line

if TYPE_CHECKING:
    from tonnage.compare.pairs import Tensor

WINDOW_TOKENS = 512
"""Tokens of the text that are seen together; nothing is predicted for the first of them."""

ANSWER_TOKENS = 32
_ROWS = 32
"""Distributions compared at once, in float64."""
_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "BOOL": "bool"}
_MOST_SHOWN = 8
_LOCAL = {"local_files_only": True, "trust_remote_code": False}

Progress = Callable[[str], None]


def compare_answers(a: Model, b: Model, prompts: Sequence[str], progress: Progress = lambda _what: None) -> EndToEnd:
    """Return what both models make of the shipped text and of prompts.

    The first model answers every prompt greedily; then both give the next-token distributions at every token of those
    answers, so that they are asked exactly the same. Needs six bytes per parameter of one model while it is loaded,
    four afterwards, and the logits of all tokens of the first.

    Args:
        a: Divergence is that of the other from this one.
        b: The other.
        prompts: To be answered.
        progress: Told what begins.

    Raises:
        CompareError: torch or transformers is missing, weights are stored in a form of unknown values, or transformers
            knows no such model.
    """
    _modules()
    for model in (a, b):
        _check_forms(model)
    tokens = _tokenizer(a, b)
    text = [part for part in _parts(_encode(tokens, shipped_text(), a)) if len(part) > 1]
    asked = [_encode(tokens, prompt, a) for prompt in prompts]
    progress(f"loading {a.name}")
    with loaded(a) as (model, ignored_a):
        progress(f"{a.name}: {sum(map(len, text))} tokens of text, {len(asked)} prompts")
        told = [_go_on(model, ids) for ids in asked]
        first_text = [logits_of(model, ids, 1) for ids in text]
        first_told = [logits_of(model, ids, len(prompt)) for prompt, ids in zip(asked, told, strict=True)]
    progress(f"loading {b.name}")
    with loaded(b) as (model, ignored_b):
        progress(f"{b.name}: the same tokens")
        of_text = [
            _agreement(one, logits_of(model, ids, 1), ids[1:]) for one, ids in zip(first_text, text, strict=True)
        ]
        of_told = [
            _agreement(one, logits_of(model, ids, len(prompt)), ids[len(prompt) :])
            for one, prompt, ids in zip(first_told, asked, told, strict=True)
        ]
    return EndToEnd(
        text=sum(of_text, start=Agreement()),
        text_title=TEXT_TITLE,
        text_sha256=text_digest(),
        prompts=sum(of_told, start=Agreement()),
        answers=tuple(one.agreeing == one.positions for one in of_told),
        ignored=(ignored_a, ignored_b),
        versions={module.__name__: str(module.__version__) for module in _modules()},
    )


def _modules() -> tuple[Any, Any]:
    """Return torch and transformers."""
    try:
        return import_module("torch"), import_module("transformers")
    except ImportError as error:
        what, expected = "needs PyTorch and transformers", "pip install 'tonnage[torch]'"
        raise CompareError(Problem(where="--end-to-end", what=what, expected=expected, found=str(error))) from error


# --- tokens -----------------------------------------------------------------------------------------------------------


def _tokenizer(a: Model, b: Model) -> Any:
    """Return the tokenizer of the first, or of the second if only that has one."""
    _, transformers = _modules()
    found = []
    for model in (a, b):
        try:
            return transformers.AutoTokenizer.from_pretrained(model.root, **_LOCAL)
        except (OSError, ValueError, KeyError, ImportError) as error:
            found.append(f"{model.name}: {error}")
    raise CompareError(
        Problem(where=a.name, what="no tokenizer", expected="tokenizer.json", found=one_line("; ".join(found)))
    )


def _encode(tokens: Any, text: str, model: Model) -> list[int]:
    ids: list[int] = tokens(text)["input_ids"]
    if not ids:
        raise CompareError(Problem(where=model.name, what="a prompt without tokens", found=text))
    return ids


def _parts(ids: list[int]) -> Iterator[list[int]]:
    for begin in range(0, len(ids), WINDOW_TOKENS):
        yield ids[begin : begin + WINDOW_TOKENS]


# --- models -----------------------------------------------------------------------------------------------------------


@contextmanager
def loaded(model: Model) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield a model of transformers, computing in float32, and the names it has no use for.

    Raises:
        CompareError: transformers does not load it, or misses weights.
    """
    torch, transformers = _modules()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    state = {name: _tensor(tensor, model) for name, tensor in model.tensors.items()}
    try:
        kind, config = _class_of(model)
        found, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError, AttributeError) as error:
        what = f"transformers {transformers.__version__} does not load this model"
        raise CompareError(Problem(where=model.name, what=what, found=str(error))) from error
    del state
    absent = sorted(str(name) for key in ("missing_keys", "mismatched_keys") for name in report[key])
    if absent:
        what = f"{len(absent)} weights of the model are not there as transformers wants them"
        raise CompareError(Problem(where=model.name, what=what, found=", ".join(absent[:_MOST_SHOWN])))
    with torch.inference_mode():
        yield found.eval(), tuple(sorted(report["unexpected_keys"]))


def _class_of(model: Model) -> tuple[Any, Any]:
    """Return the class transformers has for a config, and the config as it takes it; nothing is allocated."""
    torch, transformers = _modules()
    if not model.fields:
        raise CompareError(Problem(where=model.name, what="no config", expected=CONFIG))
    with TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(_stripped(model.fields)))
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return type(skeleton), skeleton.config


def _stripped(fields: Any) -> Any:
    """Return a config without what it says of quantisation and of code."""
    if not isinstance(fields, dict):
        return fields
    return {key: _stripped(value) for key, value in fields.items() if key not in ("quantization_config", "auto_map")}


def _check_forms(model: Model) -> None:
    """Refuse a model some weights of which nobody here can make BF16."""
    unknown = [one for one in model.tensors.values() if one.scales is None and one.stored.dtype not in _TORCH]
    if unknown:
        shown = ", ".join(f"{one.name} in {one.form}" for one in unknown[:_MOST_SHOWN])
        what, expected = f"{len(unknown)} tensors of unknown values", "floating point or MXFP8"
        raise CompareError(Problem(where=model.name, what=what, expected=expected, found=shown))


def _tensor(tensor: Tensor, model: Model) -> Any:
    """Return a tensor whole: values of MXFP8 in BF16, what is stored plain as it is."""
    torch, _ = _modules()
    first = next(windows(tensor.shape), None)
    if first is None:
        return torch.empty(tensor.shape, dtype=torch.bfloat16)
    read = stored_bits if tensor.scales is None else bf16_bits
    source: Any = tensor.stored if tensor.scales is None else tensor
    whole = np.empty((1,) * (2 - len(tensor.shape)) + tensor.shape, read(source, model.views, first).dtype)
    for window in windows(tensor.shape):
        whole[window.index] = read(source, model.views, window)
    kind = _TORCH["BF16" if tensor.scales else tensor.stored.dtype]
    return torch.from_numpy(whole.reshape(tensor.shape)).view(getattr(torch, kind))


# --- distributions ----------------------------------------------------------------------------------------------------


def _go_on(model: Any, ids: list[int]) -> list[int]:
    """Return a prompt and its greedy answer."""
    torch, _ = _modules()
    asked = torch.tensor([ids])
    told = model.generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=0
    )
    found: list[int] = told[0].tolist()
    return found


def logits_of(model: Any, ids: list[int], known: int) -> Any:
    """Return the logits of every token but the first ``known``: [tokens, vocabulary]."""
    torch, _ = _modules()
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits[known - 1 : len(ids) - 1].float().clone()


def _agreement(a: Any, b: Any, targets: list[int]) -> Agreement:
    """Return how two sets of logits differ, and how likely each holds the tokens that follow."""
    torch, _ = _modules()
    total = Agreement()
    for begin in range(0, len(targets), _ROWS):
        rows = slice(begin, begin + _ROWS)
        p, q = (torch.log_softmax(logits[rows].double(), dim=-1) for logits in (a, b))
        divergence = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0)
        chosen = torch.tensor(targets[rows]).unsqueeze(1)
        total += Agreement(
            positions=len(chosen),
            agreeing=int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum()),
            kl_sum=float(divergence.sum()),
            kl_largest=float(divergence.max()),
            nll=(-float(p.gather(1, chosen).sum()), -float(q.gather(1, chosen).sum())),
        )
    return total
