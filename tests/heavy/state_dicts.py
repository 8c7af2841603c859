"""Write ``tests/data/state_dicts.json``: what transformers' own classes would save, by name, for configs of many families.

Run: python state_dicts.py CONFIG...      (in the environment of ``make heavy``; names of files in tests/data/configs)
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

import conftest  # noqa: F401 - its stub of torchvision

DATA = Path(__file__).parent.parent / "data"
STATE_DICTS = DATA / "state_dicts.json"
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def tensors(config: dict[str, Any]) -> list[list[Any]]:
    """Return name, shape and count of every tensor of an unquantised checkpoint, ``#`` for numbers in names.

    Args:
        config: config.json; nothing of it is loaded from elsewhere.
    """
    unquantised = {k: v for k, v in config.items() if not k.startswith("_") and k != "quantization_config"}
    model = _on_meta(AutoConfig.for_model(unquantised.pop("model_type"), **unquantised))
    saved = revert_weight_conversion(model, model.state_dict())
    counts = Counter((_NUMBER.sub(".#", name), tuple(tensor.shape)) for name, tensor in saved.items())
    return [[name, list(shape), count] for (name, shape), count in sorted(counts.items())]


def _on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError:  # a model with a vision tower
            return AutoModelForImageTextToText.from_config(config)


def main(*names: str) -> None:
    """Write the document, a config per line."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(tensors(json.loads((DATA / 'configs' / f'{name}.json').read_text())))}"
        for name in sorted(names)
    )
    source = json.dumps(f"transformers {version('transformers')}, its own classes; tests/heavy/state_dicts.py")
    STATE_DICTS.write_text(f'{{"source": {source}, "tensors": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
