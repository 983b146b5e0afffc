"""Files of an experiment's model definition, one by one."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.backends.model_definition import PackedFile, list_files, read_file
from dstrial.master.clock import format_us
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.http.serializers import as_data
from dstrial.master.store import experiments


async def show_tree(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/{id}/file_tree``: directories with what is in them."""
    services = request.services
    tgz = await services.read(experiments.model_definition, request.path_params["experiment_id"])
    files = await services.run(lambda: as_data(_tree(list_files(tgz))))
    return message(bindings.v1GetModelDefTreeResponse, files=files)


def _tree(files: Sequence[PackedFile]) -> list[dict[str, Any]]:
    """Return files, by path, as nested ``v1FileNode`` objects."""
    root: list[dict[str, Any]] = []
    inside = {"": root}
    for file in files:
        parent, _, name = file.path.rpartition("/")
        children: list[dict[str, Any]] = []
        inside[file.path] = children
        # What is below a file that is none: the archive has both.
        inside.get(parent, root).append(
            message(
                bindings.v1FileNode,
                path=file.path,
                name=name,
                isDir=file.is_directory,
                contentLength=file.size,
                contentType=file.content_type,
                modifiedTime=format_us(file.modified_s * 1_000_000),
                files=children,
            )
        )
    return root


async def show_file(request: ApiRequest) -> dict[str, Any]:
    """``POST experiments/{id}/file``: one file in base64."""
    body, experiment_id = request.body(), request.path_params["experiment_id"]
    if body.integer("experimentId") not in (None, experiment_id):
        raise RequestError(
            400,
            f"experimentId is not {experiment_id}, that of the path; expected the same. Send one of them.",
        )
    path, services = body.required_text("path"), request.services
    tgz = await services.read(experiments.model_definition, experiment_id)
    content = await services.run(lambda: as_data(base64.b64encode(read_file(tgz, path)).decode()))
    return message(bindings.v1GetModelDefFileResponse, file=content)


_ONE = "/experiments/{experiment_id:int}"
routes = [
    route("GET", f"{_ONE}/file_tree", show_tree, access=TRIAL),
    route("POST", f"{_ONE}/file", show_file, access=USER),
]
