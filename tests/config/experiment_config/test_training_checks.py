import pytest
from bad_configs import EXPERIMENT, BadConfig, write

from dstrial.config import load_experiment
from dstrial.config.experiment_config.training_checks import TrainingChecks
from dstrial.errors import ConfigError


def load(tmp_path, values):
    experiment = EXPERIMENT + f"data: {{dstrial: {{{values}}}}}\n"
    return load_experiment(*write(BadConfig("none", (), None, experiment), tmp_path))


def test_the_settings_are_read(tmp_path):
    raw = load(tmp_path, "non_finite: warn, non_finite_patience: 5").raw

    assert TrainingChecks.from_config(raw) == TrainingChecks("warn", 5)
    assert TrainingChecks.from_config(None) == TrainingChecks("fail", 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            "non_finite: never",
            r"data\.dstrial\.non_finite is \"never\"; expected fail \(the default\), warn or ignore",
        ),
        (
            "non_finite_patience: 0",
            r"data\.dstrial\.non_finite_patience is 0; expected a number of reports of at least 1",
        ),
        ("non_finite_patience: true", r"data\.dstrial\.non_finite_patience is true"),
    ],
)
def test_anything_else_is_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, values)


def test_the_check_explains_them(tmp_path, capsys):
    from dstrial.cli.app import main

    experiment = EXPERIMENT + "data: {dstrial: {non_finite: warn}}\n"
    path, context_dir = write(BadConfig("none", (), None, experiment), tmp_path)
    assert main(["check", str(path), str(context_dir), "--explain"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["data.dstrial.non_finite", '"warn"', str(path)] in printed
    assert ["data.dstrial.non_finite_patience", "3", "dstrial's", "default"] in printed
