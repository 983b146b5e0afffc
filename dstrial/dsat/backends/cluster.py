"""Measure trials as ``single`` experiments, through Determined's client."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from determined.common import api, context
from determined.common.api import authentication, bindings, errors
from determined.experimental import Determined
from determined.experimental.client import Experiment, ExperimentState

from dstrial.config.documents import yaml_text
from dstrial.context_directory import list_context
from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.experiments import Submitted, is_outage, outage_errors, outcome_of
from dstrial.dsat.backends.trial_spec import RESULTS_DIRECTORY, TrialSpec, results_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.outcome import Failure, FailureKind
from dstrial.errors import ConfigError, ConfigProblem, DstrialError

logger = logging.getLogger("dstrial.dsat")

_POLL_PERIOD_S = 1.0
_RETRY_S = 2.0
_NOTES_BEGIN = "Report of a search of dsat (JSON; do not edit):\n"
_T = TypeVar("_T")
_GONE = (
    ExperimentState.CANCELED,
    ExperimentState.STOPPING_CANCELED,
    ExperimentState.STOPPING_KILLED,
    ExperimentState.DELETED,
    ExperimentState.DELETING,
)


class ClusterBackend:
    """Submits one experiment per trial, and asks for its state about once a second.

    While the master is away, it waits; experiments go on meanwhile. The master and the login are those of the ``det`` command
    (``DET_MASTER``, ``det user login``).
    """

    shows_reports = True

    def __init__(
        self,
        settings: SearchConfig,
        should_stop: Callable[[], bool] = lambda: False,  # whether to wait for nobody any more
        # of the search whose results are kept in a checkpoint
        search_id: str | None = None,
    ) -> None:
        self._settings = settings
        self._search_id = search_id
        self._should_stop = should_stop
        self._submitted: dict[int, Submitted] = {}
        self._ended: list[Ended] = []
        self._next_poll_s = 0.0
        self._is_outage = False
        self._is_login_new = False
        # The experiment whose notes hold the report: the first that this process has submitted or found.
        self._shown_by: Experiment | None = None
        try:
            self.client = Determined()
            self.session = self.client._session
            self._agents = of_pool(
                bindings.get_GetAgents(self.session).agents,
                str((settings.experiment.raw.get("resources") or {}).get("resource_pool") or ""),
            )
        except errors.UnauthenticatedException as error:
            raise DstrialError(
                f"the master does not know who asks ({error}); expected a login. Run `det user login`."
            ) from error
        except outage_errors() as error:
            if not is_outage(error):
                raise DstrialError(
                    f"the master refuses to say what it has ({error}); expected it to. Look at its log, and at your rights there."
                ) from error
            raise DstrialError(
                f"no master answers ({error}); expected one to run trials. Start one with `dstrial up`, set DET_MASTER, or "
                "pass --local."
            ) from error

    @property
    def num_parallel(self) -> int:
        """One trial per agent that has room for it, so that no two trials share a machine."""
        slots = self._settings.num_slots
        with_room = sum(1 for agent in self._agents if len(agent.slots or {}) >= slots)
        return max(with_room or sum(len(agent.slots or {}) for agent in self._agents) // slots, 1)

    def has_machine_for(self, num_slots: int) -> bool:
        """Return whether one agent has so many slots."""
        return any(len(agent.slots or {}) >= num_slots for agent in self._agents)

    @property
    def has_accelerators(self) -> bool:
        slots = [slot for agent in self._agents for slot in (agent.slots or {}).values()]
        kinds = {slot.device.type for slot in slots if slot.device is not None}
        return bool(kinds - {bindings.devicev1Type.CPU, bindings.devicev1Type.UNSPECIFIED})

    def describe(self) -> str:
        return f"the master at {self.client._master}, {self._settings.num_slots} slot(s) per trial"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        experiment = self.retry_until_available(lambda: self.find(spec.label)) or self._submit(spec)
        if experiment is None:
            return {}
        self._submitted[spec.trial_id] = Submitted(experiment, spec.label)
        self._shown_by = self._shown_by or experiment
        return {"experiment_id": experiment.id}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        del handle
        experiment = self.retry_until_available(lambda: self.find(spec.label))
        if experiment is None:
            return False
        self._submitted[spec.trial_id] = Submitted(experiment, spec.label)
        self._shown_by = self._shown_by or experiment
        return True

    def poll(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        if time.monotonic() < self._next_poll_s:
            return ended
        self._next_poll_s = time.monotonic() + _POLL_PERIOD_S
        for trial_id, submitted in list(self._submitted.items()):
            with self.tolerate_outage():
                outcome = outcome_of(submitted, self._settings.num_slots)
                if outcome is not None:
                    del self._submitted[trial_id]
                    since_s = submitted.running_since_s
                    ended.append(Ended(trial_id, outcome, None if since_s is None else time.time() - since_s))
        return ended

    def running_s(self, trial_id: int) -> float:
        since_s = self._submitted[trial_id].running_since_s if trial_id in self._submitted else None
        return 0.0 if since_s is None else time.time() - since_s

    def kill(self, trial_id: int) -> None:
        submitted = self._submitted.pop(trial_id, None)
        if submitted is not None:
            self.kill_experiment(submitted.experiment)

    def publish(self, report: Mapping[str, Any]) -> bool:
        """Put the report into a trial's notes, unless a person has written there."""
        experiment = self._shown_by
        if experiment is None:
            return True
        is_asked = False
        try:
            with self.tolerate_outage():
                experiment.reload()
                is_asked = True
        except errors.NotFoundException:
            self._shown_by = None  # Somebody has deleted it; the next one that is submitted has the report.
            return True
        except errors.BadRequestException as error:
            logger.warning("the master does not show the experiment with the report so far (%s)", error)
            return True
        if not is_asked or (experiment.notes and not is_report(experiment.notes)):
            return is_asked
        notes = notes_of({"report": dict(report)})
        is_said = False
        try:
            with self.tolerate_outage():
                experiment.set_notes(notes)
                is_said = True
        except errors.BadRequestException as error:
            logger.warning("the master refuses the report of the search so far (%s)", error)
            return True
        return is_said

    def finish(self, results: Mapping[str, str]) -> None:
        """Submit an experiment without slots that keeps the files, once trials have ended."""
        if self._search_id is None or "best_ds_config.json" not in results:
            return
        spec = results_config(self._settings, self._search_id)
        try:
            experiment = self.retry_until_available(lambda: self.find(spec.label))
            if experiment is None:
                files = {f"{RESULTS_DIRECTORY}/{name}": text for name, text in results.items()}
                experiment = self.create(spec.config, spec.label, {f"{RESULTS_DIRECTORY}/": "", **files})
            self.show_results(experiment, results)
        except errors.APIException as error:
            logger.warning(
                "the master refuses an experiment that would keep the results in a checkpoint (%s); they are in the search's "
                "directory only",
                error,
            )

    def show_in(self, experiment: Experiment) -> None:
        """Show the report of the search in another experiment's notes."""
        self._shown_by = experiment

    def show_results(self, experiment: Experiment, results: Mapping[str, str]) -> None:
        """Leave the whole report of a search for the page."""
        kept = {name: text for name, text in results.items() if name == "report.json"}
        self.retry_until_available(lambda: experiment.set_notes(notes_of({"results": kept})))

    def close(self) -> None:
        for trial_id in list(self._submitted):
            self.kill(trial_id)

    def create_full_experiment(self, config: Mapping[str, Any], search_id: str) -> int:
        """Submit the best configuration, once per search; return its experiment id."""
        label = f"dsat-{search_id}-full"
        labels = [*(str(one) for one in config.get("labels") or []), label]
        found = self.retry_until_available(lambda: self.find(label))
        return int((found or self.create({**config, "labels": labels}, label)).id)

    # ---- machinery -------------------------------------------------------------------------------

    def _submit(self, spec: TrialSpec) -> Experiment | None:
        try:
            return self.create(spec.config, spec.label)
        except errors.APIException as error:
            if error.status_code != 400:
                raise DstrialError(
                    f"the master refuses an experiment ({error}); expected it to run one."
                ) from error
            self._ended.append(Ended(spec.trial_id, Failure(FailureKind.BAD_CONFIG, str(error), "check")))
            return None

    def create(
        self, config: dict[str, Any], label: str, texts: Mapping[str, str] = MappingProxyType({})
    ) -> Experiment:
        """Submit an experiment, but not twice if the master died before it answered.

        ``texts`` are further files of its context, name -> text; a name with a slash at its end is a directory.
        """
        before = {one.id for one in self.retry_until_available(lambda: self._labelled(label))}
        is_repeated = False

        def submit() -> Experiment:
            nonlocal is_repeated
            taken = [one for one in self._labelled(label) if one.id not in before] if is_repeated else []
            is_repeated = True
            if taken:
                return taken[0]
            files = [*self._model_definition(), *(_file(name, text) for name, text in texts.items())]
            body = bindings.v1CreateExperimentRequest(
                activate=True, config=yaml_text(config), modelDefinition=files
            )
            created = bindings.post_CreateExperiment(self.session, body=body)
            for warning in created.warnings or ():
                logger.warning(api.WARNING_MESSAGE_MAP[warning])
            return self.client.get_experiment(created.experiment.id)

        return self.retry_until_available(submit)

    def _model_definition(self) -> list[bindings.v1File]:
        files = list_context(self._settings.context_dir).v1_files()
        includes = [Path(path) for path in self._settings.flags.include]
        # The client prints its progress into the middle of the search's table.
        with contextlib.redirect_stdout(io.StringIO()):
            included = context.read_v1_context(None, includes)
        twice = {file.path for file in files} & {file.path for file in included}
        if twice:
            problem = ConfigProblem(
                "--include", f"{min(twice)}, which the model definition has too", "other names", "Rename one."
            )
            raise ConfigError([problem])
        return [*files, *included]

    def find(self, label: str) -> Experiment | None:
        """Return the newest experiment of a label that was not canceled."""
        ours = [one for one in self._labelled(label) if one.state not in _GONE]
        return max(ours, key=lambda one: int(one.id), default=None)

    def _labelled(self, label: str) -> list[Experiment]:
        return [one for one in self.client.list_experiments(labels=[label]) if label in (one.labels or ())]

    def kill_experiment(self, experiment: Experiment) -> None:
        """Kill an experiment; warn that it is left if the master is away."""
        is_killed = False
        with self.tolerate_outage():
            experiment.kill()
            is_killed = True
        if not is_killed:
            logger.warning(
                "experiment %d may still have its slots, for the master does not answer: the same command goes on with "
                "it, `det experiment kill %d` ends it",
                experiment.id,
                experiment.id,
            )

    def retry_until_available(self, call: Callable[[], _T]) -> _T:
        """Return the result of ``call``, retried while the master is away.

        Raises:
            KeyboardInterrupt: the process was asked to stop meanwhile.
        """
        while True:
            answers: list[_T] = []
            with self.tolerate_outage():
                answers.append(call())
            if answers:
                return answers[0]
            if self._should_stop():
                raise KeyboardInterrupt
            time.sleep(_RETRY_S)

    @contextlib.contextmanager
    def tolerate_outage(self) -> Iterator[None]:
        """Wait for a master that is away, and say so once; log in again once."""
        try:
            yield
        except errors.UnauthenticatedException:
            if self._is_login_new:
                raise
            # Experiments have the same session.
            login = authentication.login_with_cache(self.client._master, cert=self.session.cert)
            self.session.token, self._is_login_new = login.token, True
        except outage_errors() as error:
            if not is_outage(error):
                raise
            if not self._is_outage:
                logger.warning(
                    "the master at %s does not answer (%s); waiting for it, trials go on meanwhile",
                    self.client._master,
                    type(error).__name__,
                )
            self._is_outage = True
        else:
            self._is_login_new = False
            if self._is_outage:
                logger.warning("the master answers again")
            self._is_outage = False


def _file(name: str, text: str) -> bindings.v1File:
    is_directory = name.endswith("/")
    mode = stat.S_IFDIR | 0o700 if is_directory else stat.S_IFREG | 0o600
    content = base64.b64encode(text.encode()).decode()
    kind = ord("5") if is_directory else ord("0")  # of tar
    return bindings.v1File(
        content=content, gid=0, mode=mode, mtime=str(int(time.time())), path=name, type=kind, uid=0
    )


def notes_of(fields: Mapping[str, Any]) -> str:
    """Return a report, or the files of results, as notes of an experiment."""
    return _NOTES_BEGIN + json.dumps(fields)


def is_report(notes: str) -> bool:
    """Return whether notes are those of :func:`notes_of`, not of a person."""
    return notes.startswith(_NOTES_BEGIN)


def of_pool(agents: Sequence[bindings.v1Agent], pool: str) -> list[bindings.v1Agent]:
    """Return the agents of an experiment's pool; all of them if it names none.

    An agent that has not named its pool counts for every pool.
    """
    return [agent for agent in agents if pool in (agent.resourcePools or ())] or list(agents)
