"""Hundreds of concurrent submissions, also with a master that is killed meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from submitting import config
from waiting import wait_for

from dstrial.errors import MasterError
from dstrial.master.client import Client
from dstrial.testing.master import master_for_test

NUM_CLIENTS = 24
NUM_EACH = 21


@pytest.mark.process
@pytest.mark.parametrize("is_killed", [False, True])
def test_confirmed_submissions_are_stored_exactly_once(tmp_path: Path, *, is_killed: bool) -> None:
    confirmed: dict[str, int] = {}
    refused: list[str] = []
    lock = threading.Lock()

    def submit_many(number: int, client: Client) -> None:
        for index in range(NUM_EACH):
            name = f"{number}-{index}"
            body = {"config": yaml.safe_dump(config(name=name)), "modelDefinition": []}
            try:
                answer = client.post("/api/v1/experiments", body)
            except MasterError:
                with lock:
                    refused.append(name)
            else:
                with lock:
                    confirmed[name] = int(answer["experiment"]["id"])

    with master_for_test(tmp_path, num_slots=1) as master:
        clients = [master.client() for _ in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            ends = [pool.submit(submit_many, number, client) for number, client in enumerate(clients)]
            if is_killed:
                wait_for(lambda: len(confirmed) >= 50)
                master.kill()
                master.up()
            for end in ends:
                end.result()
        stored = master.client().get("/api/v1/experiments?limit=-1")["experiments"]

    by_name = {one["name"]: int(one["id"]) for one in stored}
    assert len(by_name) == len(stored)
    assert {name: by_name.get(name) for name in confirmed} == confirmed
    assert len(set(by_name.values())) == len(stored)
    assert len(confirmed) + len(refused) == NUM_CLIENTS * NUM_EACH
    assert (refused != []) == is_killed
