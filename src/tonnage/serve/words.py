"""The words an engine is started with, its environment, and what a user may add to them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.checkpoint.strict_json import Members, NotJsonError, members
from tonnage.errors import FlagsError, Problem, raise_if_any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tonnage.flags.values import ServeCommand
    from tonnage.topology import Device

OWNED = {
    "--model": "PACKAGE", "--load-format": "PACKAGE", "--quantization": "PACKAGE", "--dtype": "PACKAGE",
    "--model-loader-extra-config": "--key", "--tensor-parallel-size": "--tp", "--pipeline-parallel-size": "--pp",
    "--decode-context-parallel-size": "--dcp", "--enable-expert-parallel": "--ep", "--max-model-len": "--context",
    "--max-num-seqs": "--profile", "--max-num-batched-tokens": "--profile", "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-bytes", "--gpu-memory-utilization": "--utilization",
    "--device-memory-utilization": "--utilization", "--enforce-eager": "--eager",
    "--speculative-config": "--draft", "--spec-method": "--draft-method", "--spec-model": "--draft",
    "--spec-tokens": "--draft-tokens", "--host": "--host", "--port": "--port", "--served-model-name": "--name",
}  # fmt: skip
"""Flags that follow from the plan, and the option that says the same."""
UNPLANNED = (
    "--config", "--hf-overrides", "--hf-config-path", "--config-format", "--model-class-overrides", "--model-impl",
    "--quantization-config", "--additional-config", "--block-size", "--num-gpu-blocks-override", "--cpu-offload-gb",
    "--cpu-offload-params", "--kv-cache-dtype-skip-layers", "--kv-transfer-config", "--weight-transfer-config",
    "--prefill-context-parallel-size", "--enable-lora", "--enable-eplb", "--enable-dbo", "--enable-elastic-ep",
    "--enable-sleep-mode", "--compilation-config", "--optimization-level", "--performance-mode",
    "--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--disable-hybrid-kv-cache-manager",
    "--mm-ipc-gpu-memory-gb", "--runner", "--convert", "--disable-sliding-window", "--language-model-only",
    "--mm-encoder-only", "--mm-encoder-tp-mode", "--expert-placement-strategy", "--enable-cumem-allocator",
    "--dcp-q-replicate", "--ubatch-size", "--diffusion-config", "--engram-config", "--swa-bounded-replay",
    "--worker-cls", "--worker-extension-cls", "--grpc", "--device-ids",
    "--distributed-executor-backend", "--nnodes", "--node-rank", "--headless",
    "--api-server-count", "--uds", "--ssl-keyfile", "--ssl-certfile", "--root-path", "--log-config-file", "--log-level",
    "--logging-config", "--aggregate-engine-logging",
)  # fmt: skip
"""Flags under which the engine would hold other bytes than planned, run elsewhere, or not say what it holds."""
UNPLANNED_FAMILIES = ("--data-parallel", "--offload-", "--kv-offloading-", "--mamba-")
_SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size", "-ep": "--enable-expert-parallel",
    "-q": "--quantization", "-sc": "--speculative-config", "-cc": "--compilation-config", "-O": "--compilation-config",
    "-n": "--nnodes", "-r": "--node-rank", "-asc": "--api-server-count", "-dp": "--data-parallel-size",
    "-dc": "--diffusion-config",
}  # fmt: skip
REMOTE_CODE = "--trust-remote-code"
_HIDDEN = "***"
_SECRETS = ("--api-key", "--hf-token")
_SECRET_PARTS = frozenset({"key", "keys", "apikey", "token", "secret", "password", "passphrase", "credentials"})
_SHORTEST_SECRET, _SHORTEST_OF_ENVIRONMENT = 4, 8
"""In characters: to look for a shorter one in a line would hide what is none."""
_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/@:\s]*):(?P<password>[^/@\s]+)(?=@)")
_OVERRIDES = ("VLLM_CPU_KVCACHE_SPACE",)
"""Variables by which an engine would take another cache than it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How an engine is started.

    Attributes:
        words: Program and what stands before the model.
        names_model: Whether the model stands behind ``--model``.
        release: Its version, if it is installed beside this program.
        device: What it was built for.
    """

    words: tuple[str, ...]
    names_model: bool = False
    release: str | None = None
    device: Device = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the engine answers: ``host`` and ``port`` as it is told, ``name`` of the model."""

    host: str
    port: int
    name: str

    @property
    def asked_host(self) -> str:
        """The host to ask whether it is ready: this machine, where it listens on all addresses."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104 - compared

    @property
    def url(self) -> str:
        """What clients are told."""
        host = f"[{self.asked_host}]" if ":" in self.asked_host else self.asked_host
        return f"http://{host}:{self.port}"


def engine_words(command: ServeCommand, program: Program, address: Address, extra: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the process.

    Args:
        command: ``vllm serve MODEL`` and its flags, :func:`tonnage.flags.vllm.vllm_command`.
        program: How this machine starts it.
        address: Where it is to answer.
        extra: Passed on behind them.

    Raises:
        FlagsError: An extra word says what the plan says, or a name is none; all problems at once.
    """
    raise_if_any(FlagsError, (*_name_problems(address.name), *_extra_problems(extra)))
    _, _, model, *flags = command.words
    named = ("--model", model) if program.names_model else (model,)
    where = ("--host", address.host, "--port", str(address.port), "--served-model-name", address.name)
    return (*program.words, *named, *flags, *where, *extra)


def engine_environment(environment: Mapping[str, str], gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of the process.

    Nothing is imported from the directory it is started in, nothing is asked of a hub unless the user's own environment
    says so, and the log says its figures.

    Args:
        environment: Of this process.
        gpus: Which GPUs of the driver it may use; none to leave that to the environment.
    """
    kept = {name: value for name, value in environment.items() if name not in _OVERRIDES}
    kept["PYTHONSAFEPATH"] = "1"
    kept["PYTHONUNBUFFERED"] = "1"
    kept.setdefault("HF_HUB_OFFLINE", "1")
    kept["VLLM_CONFIGURE_LOGGING"] = "1"
    if kept.get("VLLM_LOGGING_LEVEL", "INFO").upper() != "DEBUG":
        kept["VLLM_LOGGING_LEVEL"] = "INFO"
    if gpus:
        kept |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return kept


def overridden(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return variables that are set and not passed on."""
    return tuple(name for name in _OVERRIDES if environment.get(name))


def runs_remote_code(extra: Sequence[str]) -> bool:
    """Whether the engine is asked to execute what is in the model's directory."""
    return any(_matches(flag, REMOTE_CODE) for word in extra for flag in _flags(word))


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Return words as they may be shown and kept: ``***`` for keys, tokens and passwords.

    >>> masked(["vllm", "--api-key", "a", "b", "--seed", "7", "--hf_token=c", "--max-num-batched-tokens", "8"])
    ('vllm', '--api-key', '***', '***', '--seed', '7', '--hf_token=***', '--max-num-batched-tokens', '8')
    >>> masked(["env", "HF_TOKEN=d", "vllm", "--x", '{"api_key": "e", "size": 2}', "--y=http://me:f@host/"])
    ('env', 'HF_TOKEN=***', 'vllm', '--x', '{"api_key": "***", "size": 2}', '--y=http://me:***@host/')
    """
    return tuple(shown for shown, _ in _parted(words))


def unsaid(line: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return a line of an engine without the secrets it was started with, as words or in its environment."""
    said = {secret for _, secrets in _parted(words) for secret in secrets if len(secret) >= _SHORTEST_SECRET}
    said.update(
        value
        for name, value in (environment or {}).items()
        if len(value) >= _SHORTEST_OF_ENVIRONMENT and _is_called_secret(name)
    )
    for secret in sorted(said, key=len, reverse=True):
        line = line.replace(secret, _HIDDEN)
    return line


def _parted(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield every word as it may be shown, and the secrets in it."""
    follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        if follows and not word.startswith("--"):
            yield _HIDDEN, [word]
            continue
        follows = word.startswith("--") and not equals and _is_secret(name)
        yield _opened(word)


def _opened(word: str) -> tuple[str, list[str]]:
    """Return one word without the secrets in it, and these: ``NAME=SECRET``, members of JSON, passwords of URLs."""
    name, equals, value = word.partition("=")
    if equals and (_is_secret(name) if name.startswith("--") else _is_called_secret(name)):
        return f"{name}={_HIDDEN}", [value]
    if equals and not name.startswith(("{", "[")):
        shown, secrets = _opened(value)
        return f"{name}={shown}", secrets
    secrets = []
    if word.startswith(("{", "[")):
        try:
            document = _without(members(word.encode("utf-8", "surrogateescape")), secrets, secret=False)
        except (NotJsonError, RecursionError):
            return word, []
        return (json.dumps(document, ensure_ascii=False), secrets) if secrets else (word, [])
    secrets = [found["password"] for found in _PASSWORD.finditer(word)]
    return _PASSWORD.sub(rf"\g<user>:{_HIDDEN}", word), secrets


def _without(value: object, secrets: list[str], *, secret: bool) -> object:
    """Return a value of JSON without the texts below members that are called secrets, which are noted."""
    if isinstance(value, Members):
        return {key: _without(one, secrets, secret=secret or _is_called_secret(key)) for key, one in value}
    if isinstance(value, list):
        return [_without(one, secrets, secret=secret) for one in value]
    if isinstance(value, str) and secret:
        secrets.append(value)
        return _HIDDEN
    return value


def _is_secret(flag: str) -> bool:
    """Whether what follows a flag is a secret, by what it is called; an engine takes it shortened as well."""
    return _is_called_secret(flag) or any(_matches(one, known) for one in _flags(flag) for known in _SECRETS)


def _is_called_secret(name: str) -> bool:
    parts = name.lower().replace("_", "-").replace(".", "-").split("-")
    return not _SECRET_PARTS.isdisjoint(parts) and "public" not in parts


def _name_problems(name: str) -> Iterator[Problem]:
    if not name or name.startswith("-") or not name.isprintable():
        found = repr(name)
        yield Problem(where="--name", what="no name of a model", expected="printable, no dash first", found=found)


def _extra_problems(extra: Sequence[str]) -> Iterator[Problem]:
    for word in extra:
        flags = _flags(word)
        owner = next((option for owned, option in OWNED.items() if any(_matches(flag, owned) for flag in flags)), None)
        if owner is not None:
            yield Problem(where=masked([word])[0], what="follows from the plan", expected=owner)
        elif any(
            flag.startswith(UNPLANNED_FAMILIES) or any(_matches(flag, name) for name in UNPLANNED) for flag in flags
        ):
            yield Problem(where=masked([word])[0], what="would serve something else than was planned")


def _flags(word: str) -> tuple[str, ...]:
    """Return the flags an engine may take a word for, spelled out; none for a value.

    Short ones are read shortened as well, those of one letter with their value right behind it.

    >>> _flags("--max_model_len=8"), _flags("--no-enable-lora"), _flags("-tp=2"), _flags("-t")
    (('--max-model-len',), ('--enable-lora',), ('--tensor-parallel-size',), ('--tensor-parallel-size',))
    >>> _flags("-qfp8"), _flags("-O3"), _flags("8"), _flags("-1")
    (('--quantization',), ('--compilation-config',), (), ())
    """
    name = word.partition("=")[0].partition(".")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
        return (name.replace("--no-", "--", 1) if name.startswith("--no-") else name,)
    if not name.startswith("-") or name == "-":
        return ()
    if name.startswith("-dp"):
        return ("--data-parallel",)
    return tuple(flag for short, flag in _SHORT.items() if short.startswith(name) or name[:2] == short)


def _matches(given: str, flag: str) -> bool:
    """Whether an engine would read a word as a flag: as it is, or shortened."""
    return given == flag or (len(given) > len("--") and flag.startswith(given))
