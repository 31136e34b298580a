"""A response as a table for people."""

from __future__ import annotations

from typing import Any

from .errors import printable

BAR_WIDTH = 24


def table(response: dict[str, Any]) -> str:
    """One line per option, the decision marked, its probability as a bar."""
    lines = []
    for name, answer in response["answers"].items():
        lines.append(f"{name}: {_decision(answer)}")
        options = _probabilities(answer)
        width = max(len(printable(option)) for option in options)
        best = max(options, key=options.__getitem__)
        for option, probability in options.items():
            bar = "█" * round(probability * BAR_WIDTH)
            mark = "→" if option == best else " "
            lines.append(f"  {mark} {printable(option):{width}}  {probability:6.1%}  {bar}".rstrip())
    return "\n".join(lines)


def _decision(answer: dict[str, Any]) -> str:
    if answer["type"] == "noul":
        return "yes" if answer["noul"] >= 0.5 else "no"
    if answer["type"] == "choice":
        return printable(answer["choice"])
    return f"{answer['score']:.2f} of {len(answer['legend']) - 1}"


def _probabilities(answer: dict[str, Any]) -> dict[str, float]:
    if answer["type"] == "noul":
        return {"yes": answer["noul"], "no": 1 - answer["noul"]}
    if answer["type"] == "score":
        return {f"{level} {answer['legend'][level]}": p for level, p in answer["probabilities"].items()}
    probabilities: dict[str, float] = answer["probabilities"]
    return probabilities
