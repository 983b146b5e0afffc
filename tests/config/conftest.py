import pytest
from bad_configs import EXPERIMENT, BadConfig, write
from hypothesis import settings

from dstrial.config.experiment_config.config import load_experiment

settings.register_profile("dstrial", deadline=None)
settings.load_profile("dstrial")


@pytest.fixture
def load(tmp_path):
    """Return a function that loads an experiment from files; ``more`` extends YAML."""

    def load(experiment=EXPERIMENT, deepspeed=None, overrides=(), *, more="", source=None, **options):
        path, context_dir = write(BadConfig("none", (), deepspeed, experiment + more), tmp_path)
        if source is not None:
            (tmp_path / "model_def.py").write_text(source)
        return load_experiment(path, context_dir, overrides, **options)

    return load
