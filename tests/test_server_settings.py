"""Where settings come from, and what wrong ones say."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from clef_trt import SettingError
from clef_trt.cli import main
from clef_trt.server.settings import PREFIX, Settings, add_flags, read_settings


def flags(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def test_defaults_are_those_of_the_contract() -> None:
    settings = read_settings({}, {})
    assert settings == Settings()
    assert (settings.body_bytes, settings.decoded_bytes, settings.total_bytes) == (13 * 2**20, 13 * 2**20, 8 * 2**20)
    assert (settings.questions, settings.options, settings.levels) == (64, 255, 10)
    assert (settings.images, settings.videos, settings.frames) == (4, 2, 64)
    assert (settings.picture_bytes, settings.picture_pixels) == (4 * 2**20, 16_000_000)
    assert (settings.confidence, settings.vendor_confidence, settings.max_length) == ("max", "entropy", 16384)


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('port = 1\nqueue = 100\nbatch = 2\npage = false\napi_keys = ["a", "b"]\nwindow_ms = 3\n')
    environment = {"CLEF_TRT_QUEUE": "200", "CLEF_TRT_BATCH": "4", "CLEF_TRT_CONFIG": str(path), "OTHER": "x"}
    settings = read_settings(flags("bundle", "--batch", "8", "--model", "m", "--model", "n*"), environment)
    assert (settings.bundle, settings.port, settings.queue, settings.batch) == ("bundle", 1, 200, 8)
    assert (settings.page, settings.api_keys, settings.window_ms) == (False, ("a", "b"), 3.0)
    assert settings.models == ("m", "n*")
    assert read_settings(flags("--config", str(path)), {"CLEF_TRT_CONFIG": "nothing"}).port == 1
    assert read_settings(flags("--page"), {"CLEF_TRT_PAGE": "no"}).page
    assert read_settings({}, {"CLEF_TRT_API_KEYS": "one, two", "CLEF_TRT_MAX_STATE_TOKENS": "5"}).api_keys == (
        "one",
        "two",
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "content", "said"),
    [
        ((), {"CLEF_TRT_QUEU": "5"}, "", "CLEF_TRT_QUEU is no setting; there are bundle, host, port,"),
        ((), {}, "speed = 1", "serve.toml: speed is no setting; there are bundle,"),
        ((), {}, "port = '8000", "is no TOML"),
        (
            (),
            {"CLEF_TRT_PORT": "x"},
            "",
            "CLEF_TRT_PORT is 'x'; expected a whole number of at least 0 and at most 65535",
        ),
        ((), {}, "port = true", "serve.toml: port is True; expected a whole number"),
        ((), {}, "port = 70000", "is 70000"),
        (("--window-ms", "-1"), {}, "", "--window-ms is '-1'; expected a number of at least 0"),
        (("--window-ms", "nan"), {}, "", "--window-ms is 'nan'"),
        (("--engine", "fast"), {}, "", "--engine is 'fast'; expected one of auto, "),
        ((), {"CLEF_TRT_PAGE": "perhaps"}, "", "expected true or false"),
        ((), {}, "models = [1]", "expected a list of texts"),
        ((), {"CLEF_TRT_API_KEYS": "a b"}, "", "that no header can carry"),
        ((), {"CLEF_TRT_QUEUE": "10"}, "", "batch_items is 64; expected at most queue, which is 10"),
    ],
)
def test_wrong_settings(
    arguments: tuple[str, ...], environment: dict[str, str], content: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(content)
    with pytest.raises(SettingError) as error:
        read_settings(flags("--config", str(path), *arguments), environment)
    assert said in str(error.value)


def test_keys_are_not_told_in_errors() -> None:
    with pytest.raises(SettingError) as error:
        read_settings({}, {"CLEF_TRT_API_KEYS": "secret\x07key"})
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_there_and_no_bundle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(__import__("os").environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    assert main(["serve", "--config", "nothing.toml"]) == 2
    assert "nothing.toml cannot be read" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert "no bundle is named: clef-trt serve BUNDLE" in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = capsys.readouterr().out
    for one in fields(Settings):
        flag = {"bundle": "BUNDLE", "api_keys": "--api-key", "models": "--model"}.get(one.name)
        assert (flag or "--" + one.name.replace("_", "-")) in told
    assert PREFIX in told
