"""An S3 server for tests: moto in a separate process, with credentials checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import wait_for

from dstrial.ranks.sockets import free_port

_POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
_NUM_OPEN_CALLS = 4  # the calls of `_set_up`; moto authenticates all later calls


@dataclasses.dataclass(frozen=True)
class Bucket:
    url: str
    access_key: str
    secret_key: str
    name: str = "checkpoints"

    def client(self) -> Any:
        return _client("s3", self.url, self.access_key, self.secret_key)

    def objects(self) -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))

    def uuids(self) -> set[str]:
        """Return the UUIDs of the checkpoints that have a completion marker."""
        return {key.split("/")[-2] for key in self.objects() if key.endswith("/COMPLETE")}

    def storage(self, **changes: Any) -> dict[str, Any]:
        """Return a ``checkpoint_storage`` whose credentials come from ``variables``."""
        return {"type": "s3", "bucket": self.name, "prefix": "of/mine", "endpoint_url": self.url, **changes}

    @property
    def keys_in_config(self) -> dict[str, str]:
        return {"access_key": self.access_key, "secret_key": self.secret_key}

    @property
    def variables(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


def _client(service: str, url: str, key: str, secret: str) -> Any:
    import boto3  # here because the import is slow

    return boto3.client(
        service,
        endpoint_url=url,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )


def _set_up(url: str) -> Bucket:
    iam = _client("iam", url, "first", "first")
    iam.create_user(UserName="me")
    made = iam.create_access_key(UserName="me")["AccessKey"]
    iam.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=json.dumps(_POLICY))
    bucket = Bucket(url, made["AccessKeyId"], made["SecretAccessKey"])
    bucket.client().create_bucket(Bucket=bucket.name)
    return bucket


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[Bucket]:
    port = free_port()
    with (directory / "moto.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_NUM_OPEN_CALLS)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "Running on" in (directory / "moto.log").read_text(), "moto does not start")
        yield _set_up(f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


def assert_nowhere(secret: str, *places: Path) -> None:
    """Fail if a file at or below one of the places contains the secret."""
    for place in places:
        for path in [place, *place.rglob("*")]:
            if path.is_file() and not path.is_symlink():
                assert secret.encode() not in path.read_bytes(), path
