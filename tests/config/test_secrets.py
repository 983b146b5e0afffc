"""Secrets are masked in shown configs and restored in resubmitted configs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from dstrial.config.secrets import (
    MASK,
    SecretNames,
    masked,
    masked_json,
    masked_shell,
    masked_yaml,
    unmasked,
    unmasked_yaml,
)
from dstrial.errors import ConfigError

NAMES = SecretNames()


def _words(text: str) -> list[str]:
    return text.split()


SECRET_VARIABLES = _words("""
WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN OPENAI_API_KEY
GITHUB_TOKEN GH_PAT PGPASSWORD MYSQL_PWD DB_PASS SMTP_PASSWD PASSWORD SECRET my_secret_value GOOGLE_APPLICATION_CREDENTIALS
AZURE_STORAGE_CONNECTION_STRING apiKey authToken AUTHTOKEN API_KEYS TOKEN_FOR_X NPM_AUTH
""")
OPEN_VARIABLES = _words("""
TOKENIZERS_PARALLELISM OMP_NUM_THREADS PWD PATH PYTHONPATH NCCL_DEBUG KEYBOARD_LAYOUT AUTHOR PASSES COMPASS MAX_LENGTH
""")
SECRET_FIELDS = _words("""
api_key apiKey api-key wandb_api_key hub_token hf_token push_to_hub_token access_token auth_token password db_password
client_secret secret secret_key access_key private_key credential credentials connection_string token passphrase
""")
OPEN_FIELDS = _words("""
num_key_value_heads key_dim tokenizer tokenizer_name max_tokens num_tokens pad_token eos_token bos_token mask_token
tokens_per_batch primary_key sort_key label_key image_key key query_key_norm token_dropout unk_token sep_token
keys use_key_bias secretary passes compass author
""")


def test_secret_environment_variables_are_masked() -> None:
    for name in SECRET_VARIABLES:
        config = {"environment": {"environment_variables": {"cpu": [f"{name}=a=b", "A=1"]}}}
        shown = masked(config, NAMES)["environment"]["environment_variables"]["cpu"]
        assert shown == [f"{name}={MASK}", "A=1"]
    for name in OPEN_VARIABLES:
        config = {"environment_variables": [f"{name}=value"]}
        assert masked(config, NAMES) is config
    config = {"environment_variables": ["MAX_TOKENS=512", "HF_TOKEN=", "HTTPS_PROXY=http://me:pw@proxy:3128"]}
    shown = masked(config, NAMES)["environment_variables"]
    assert shown == ["MAX_TOKENS=512", "HF_TOKEN=", f"HTTPS_PROXY={MASK}"]


@pytest.mark.parametrize("value", ["abc", {"type": "const", "val": "abc"}, ["abc"], {"a": "abc"}])
def test_secret_fields_are_masked(value: Any) -> None:
    for name in SECRET_FIELDS:
        if name == "token" and not isinstance(value, str):
            continue  # under this name only a string is a secret
        shown = masked({"hyperparameters": {"x": {name: value}}}, NAMES)["hyperparameters"]["x"]
        assert "abc" not in json.dumps(shown)
        assert list(shown) == [name]
        if isinstance(value, dict) and "type" in value:
            assert shown[name] == {"type": "const", "val": MASK}
    for name in OPEN_FIELDS:
        config = {"hyperparameters": {name: value}, "data": {name: [value]}}
        assert masked(config, NAMES) is config


def test_storage_and_registry_credentials_are_masked() -> None:
    config = {
        "checkpoint_storage": {"type": "s3", "bucket": "b", "access_key": "AK", "secret_key": "SK"},
        "environment": {"registry_auth": {"username": "me", "password": "pw", "auth": "bWU6cHc="}},
    }

    shown = masked(config, NAMES)

    assert shown["checkpoint_storage"] == {
        "type": "s3",
        "bucket": "b",
        "access_key": MASK,
        "secret_key": MASK,
    }
    assert shown["environment"]["registry_auth"] == {"username": "me", "password": MASK, "auth": MASK}


def test_configured_names_are_masked_and_empty_values_kept() -> None:
    config = {
        "environment_variables": ["My_License=abc"],
        "data": {"study": "abc", "studies": "open"},
    }
    assert masked(config, SecretNames(("*_LICENSE", "study"))) == {
        "environment_variables": [f"My_License={MASK}"],
        "data": {"study": MASK, "studies": "open"},
    }
    config = {"password": None, "secret": True, "token": "", "api_key": False, "tokens": 5}
    assert masked(config, NAMES) is config


TEXT = """\
name: "it"
hyperparameters:
  api_key: &key hunter2
  again: {secret: *key, lr: 0.1}
  quoted: {password: 'hun''ter3'}
  block:
    client_secret: |
      hunter4
      more
    lr: 1
environment:
  environment_variables:
    - "HF_TOKEN=hunter5"
    - A=1
base: &base {hub_token: hunter6}
over:
  <<: *base
"""


def test_unmasking_masked_config_restores_secrets() -> None:
    real = yaml.safe_load(TEXT)
    assert yaml.safe_load(masked_yaml(TEXT, NAMES)) == {
        "name": "it",
        "hyperparameters": {
            "api_key": MASK,
            "again": {"secret": MASK, "lr": 0.1},
            "quoted": {"password": MASK},
            "block": {"client_secret": MASK, "lr": 1},
        },
        "environment": {"environment_variables": [f"HF_TOKEN={MASK}", "A=1"]},
        "base": {"hub_token": MASK},
        "over": {"hub_token": MASK},
    }
    assert yaml.safe_load(unmasked_yaml(masked_yaml(TEXT, NAMES), [real])) == real
    assert unmasked(masked(real, NAMES), [real]) == real
    assert json.loads(masked_json(json.dumps(real), NAMES)) == masked(real, NAMES)
    plain = "name: a  # tokenizer: b\nhyperparameters: {num_key_value_heads: 8}\n"
    assert masked_yaml(plain, NAMES) is plain
    assert masked_json('{"tokenizer": "gpt2"}', NAMES) == '{"tokenizer": "gpt2"}'


def test_unmasked_finds_variable_by_name() -> None:
    source = {"environment": {"environment_variables": {"cpu": ["A=1", "HF_TOKEN=real"], "cuda": []}}}
    given = {"environment": {"environment_variables": [f"HF_TOKEN={MASK}", "B=2"]}}
    before = copy.deepcopy(given)

    found = unmasked(given, [source])

    assert found == {"environment": {"environment_variables": ["HF_TOKEN=real", "B=2"]}}
    assert given == before
    sources = [{}, {"password": "first"}, {"password": "second"}]
    assert unmasked({"password": MASK}, sources) == {"password": "first"}


def test_unresolvable_mask_is_rejected_with_location() -> None:
    given = f"""
hyperparameters: {{api_key: "{MASK}", lr: 0.1}}
environment: {{environment_variables: ["HF_TOKEN={MASK}"]}}
"""
    with pytest.raises(ConfigError) as raised:
        unmasked_yaml(given, [{"hyperparameters": {"lr": 1}}], "experiment config")

    places = [problem.where for problem in raised.value.problems]
    assert places == [
        "experiment config: hyperparameters.api_key",
        "experiment config: environment.environment_variables.HF_TOKEN",
    ]
    assert "Write the real value." in str(raised.value)


def test_masked_shell_hides_assigned_secrets() -> None:
    text = "export HF_TOKEN=abc; A=1\nPASSWORD='x y' run"

    assert masked_shell(text, NAMES) == f"export HF_TOKEN={MASK}; A=1\nPASSWORD={MASK} run"
