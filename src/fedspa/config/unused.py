"""Settings that the run's method cannot use: they are recorded as unused, and the user gets a sentence on each."""

from __future__ import annotations

from typing import Any

from fedspa.core.settings import Config

LAYER_SPARSITY = {"name": "erk", "mask_scope": "all"}
"""The layer sparsity of conf/config.yaml, which no user chose."""

_OF_UPDATES = ("faults.loss", "faults.corruption", "faults.deadline", "faults.norm_bound")
"""The settings of the messages that clients send to the server."""


def leave_out(settings: Config, parts: dict[str, Any], resolved: dict[str, Any]) -> tuple[str, ...]:
    """Set unused settings to 0 in `resolved`, so that they do not make another experiment.

    Returns a sentence on each unused setting that the user has set.

    `parts`: the built components by group. Unused defaults are left out without a sentence.
    """
    method, sentences = parts["method"], []
    name = resolved["method"]["name"]
    if not method.uses_sparsity:
        if settings.sparsity not in (0, Config.sparsity):
            sentences.append(f"sparsity={settings.sparsity:g} is not used: method={name} trains dense")
        settings.sparsity = resolved["sparsity"] = 0.0
    shape = resolved["layer_sparsity"]
    if any(shape.get(key) != value for key, value in LAYER_SPARSITY.items()):
        words = f"layer_sparsity={shape['name']} (mask_scope={shape.get('mask_scope')})"
        if not method.uses_mask:
            sentences.append(f"{words} is not used: method={name} has no mask searcher")
        elif parts["mask"] is not None and not parts["mask"].keeps_tensors:
            searcher = resolved["mask"]["name"]
            sentences.append(
                f"{words} only sets how many weights are active in all: mask={searcher} shares them out itself"
            )
    if settings.finetune.epochs and "global" not in method.kinds:
        sentences.append(
            f"finetune.epochs={settings.finetune.epochs} is not done: method={name} has no global model to fine-tune"
        )
        resolved["finetune"]["epochs"] = 0
    if not method.sends:
        idle, why = ["federation.wire", *_OF_UPDATES], "sends nothing"
    elif "global" not in method.kinds:  # weights that travel go from client to client
        idle = list(_OF_UPDATES) if method.sends_weights else ["faults.norm_bound"]
        why = "sends no weights to a server"
    else:
        idle, why = [], ""
    for key in idle:
        section, option = key.split(".")
        if value := getattr(getattr(settings, section), option):
            sentences.append(f"{key}={value} has no effect: method={name} {why}")
    if settings.save.upload_weights and not _sends_files(parts["loggers"]):
        sentences.append(
            "save.upload_weights=true sends nothing: there is no MLflow among the loggers (logger=mlflow)"
        )
    return tuple(sentences)


def _sends_files(loggers: dict[str, Any]) -> bool:
    return any(getattr(logger, "takes_files", False) for logger in loggers.values())
