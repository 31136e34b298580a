"""Compiled passes at the shape, of bench/device.py: torch.compile of the layers of both backbones."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator

import torch
from device_parts import Task, Told
from device_passes import System, key, plan, prepared, take_turns
from torch import nn

FIRST_COMPILE_S = 35.0  # what must be left for a first compilation
UNROLLED = 2.5  # what twice the chunks cost, over the length before


def compiled(task: Task, told: Told) -> None:
    """torch.compile of every layer, the delta rule left out of it, and then with its loop over chunks unrolled.

    Without the rule one compilation serves all lengths. With it each length is compiled anew, in a time that grows with
    the chunks, so that only short ones are reached. Eager transformers takes turns with the former. Single records: a
    batch would be compiled once more.
    """
    cases = [case for case in task.cases if case[1] == 1]
    around = ("transformers compiled around the rule", "ours compiled around the rule")
    whole = ("transformers compiled whole", "ours compiled whole")
    plan(told, cases, ("transformers beside compiled", *around))
    plan(told, cases, whole)
    model = prepared(task, told)
    known = "transformers beside compiled"
    anchor = {known: model.transformers(model.theirs)}

    def twins(names: tuple[str, str], dynamic: bool) -> dict[str, System]:
        backbones = (compiled_twin(b, dynamic, task.backend) for b in (model.theirs, model.ours))
        return {name: make(b) for name, make, b in zip(names, (model.transformers, model.own), backbones, strict=True)}

    with rule_left_out():
        systems = anchor | twins(around, dynamic=True)
        for tokens, batch in cases:
            if told.left_s() > FIRST_COMPILE_S or around[0] in model.last:
                take_turns(model, systems, tokens, batch, told, known)
    spent_s = 0.0
    for tokens, batch in cases:
        if told.left_s() < max(FIRST_COMPILE_S, UNROLLED * spent_s):
            why = f"not begun: the delta rule's loop is unrolled; the length before took {spent_s:.0f} s"
            why = why if spent_s else "not begun: too little time was left to compile"
            for name in whole:
                told.row("rows", key(name, tokens, batch), None, why, system=name, tokens=tokens, batch=batch)
            continue
        torch.compiler.reset()
        start = time.monotonic()
        take_turns(model, twins(whole, dynamic=False), tokens, batch, told, known)
        spent_s = time.monotonic() - start


def compiled_twin(backbone: nn.Module, dynamic: bool, backend: str) -> nn.Module:
    """A copy over the same weights whose layers are compiled, one kind of layer at a time."""
    shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    twin = copy.deepcopy(backbone, shared)
    for layer in twin.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=dynamic, backend=backend)
    return twin


@contextlib.contextmanager
def rule_left_out() -> Iterator[None]:
    """Compiled layers call the delta rule eagerly."""
    from clef_export import backbone
    from transformers.models.qwen3_5 import modeling_qwen3_5

    places = ((backbone, "gated_delta_rule"), (modeling_qwen3_5, "torch_chunk_gated_delta_rule"))
    before = [getattr(module, name) for module, name in places]
    for (module, name), rule in zip(places, before, strict=True):
        setattr(module, name, torch.compiler.disable(rule))
    try:
        yield
    finally:
        for (module, name), rule in zip(places, before, strict=True):
            setattr(module, name, rule)
