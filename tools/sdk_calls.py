"""How each public method of Determined's SDK 0.38.1 is called, in this order, and what must be so afterwards.

The calls and what is so are expressions, so that the table shows what was really called. Their names: ``determined`` and
``admin``, the SDK as these users; the experiments ``ended`` (four checkpoints), ``long`` (runs) and ``spare`` (paused); ``trial``
and ``checkpoints`` of ``ended``, the latest first; ``v``, what the call has returned; and what calls have kept.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One method as it is called.

    Attributes:
        name: class and method, ``client.`` before functions.
        perform: the expression that calls it.
        is_so: what must be so afterwards.
        outcome: whether it works, works differently, or is not offered.
        reason: how it differs, or why it is not offered.
        error: what its exception says; empty where there must be none.
        keeps: the name under which other calls find what it returns.
    """

    name: str
    perform: str
    is_so: str = "True"
    outcome: Literal["works", "differs", "not offered"] = "works"
    reason: str = ""
    error: str = ""
    keeps: str = ""


def _no(name: str, perform: str, reason: str, error: str = "not offered by the embedded master") -> Call:
    return Call(name, perform, "False", "not offered", reason, error)


_SSO = "single sign-on needs an identity provider"
_BINDINGS = "there is one resource pool, open to every workspace"
CALLS: tuple[Call, ...] = (
    # Users
    Call("Determined.whoami", "determined.whoami()", "v.username == 'determined'"),
    Call("Determined.get_session_username", "determined.get_session_username()", "v == 'determined'"),
    Call("Determined.list_users", "determined.list_users(active=True)", "len(v) == 2"),
    Call(
        "Determined.create_user",
        "admin.create_user('ada', False, 'Secret-word-1')",
        "v.username == 'ada'",
        keeps="user",
    ),
    Call("Determined.get_user_by_id", "determined.get_user_by_id(user.user_id)", "v.username == 'ada'"),
    Call("Determined.get_user_by_name", "admin.get_user_by_name('ada')", "v.user_id == user.user_id"),
    Call("User.rename", "user.rename('ada2')", "fresh(user).username == 'ada2'"),
    Call("User.change_display_name", "user.change_display_name('Ada')", "fresh(user).display_name == 'Ada'"),
    Call(
        "User.change_password",
        "user.change_password('Secret-word-2')",
        "client.Determined(live.master.address, 'ada2', 'Secret-word-2').whoami().username == 'ada2'",
    ),
    Call("User.deactivate", "user.deactivate()", "not fresh(user).active"),
    Call("User.activate", "user.activate()", "fresh(user).active"),
    Call("User.reload", "user.reload()", "user.display_name == 'Ada'"),
    _no(
        "User.link_with_agent",
        "user.link_with_agent(1000, 1000, 'ada', 'ada')",
        "trials run as the user who started the master",
    ),
    # Workspaces and projects
    Call(
        "Determined.create_workspace",
        "determined.create_workspace('lab')",
        "v.name == 'lab'",
        keeps="workspace",
    ),
    Call("Determined.get_workspace", "determined.get_workspace('lab')", "v.id == workspace.id"),
    Call(
        "Determined.list_workspaces",
        "determined.list_workspaces()",
        "{one.name for one in v} == {'Uncategorized', 'lab'}",
    ),
    Call("Workspace.reload", "workspace.reload()", "workspace.name == 'lab'"),
    Call(
        "Workspace.create_project",
        "workspace.create_project('digits', 'd')",
        "v.description == 'd'",
        keeps="project",
    ),
    Call("Workspace.get_project", "workspace.get_project('digits')", "v.id == project.id"),
    Call("Workspace.list_projects", "workspace.list_projects()", "[one.name for one in v] == ['digits']"),
    Call("Workspace.list_pools", "workspace.list_pools()[0]", "v.name == 'default'", keeps="pool"),
    Call("Project.set_name", "project.set_name('numbers')", "fresh(project).name == 'numbers'"),
    Call("Project.set_description", "project.set_description('x')", "fresh(project).description == 'x'"),
    Call("Project.set_key", "project.set_key('NUM')", "fresh(project).key == 'NUM'"),
    Call(
        "Project.add_note",
        "project.add_note('n', 'text')",
        "[one['name'] for one in fresh(project).notes] == ['n']",
    ),
    Call("Project.remove_note", "project.remove_note('n')", "fresh(project).notes == []"),
    Call("Project.archive", "project.archive()", "fresh(project).archived"),
    Call("Project.unarchive", "project.unarchive()", "not fresh(project).archived"),
    Call("Project.reload", "project.reload()", "project.name == 'numbers'"),
    # Experiments
    Call(
        "Determined.create_experiment",
        "determined.create_experiment(config(), out / 'context')",
        "v.id > 3",
        keeps="created",
    ),
    Call("Determined.get_experiment", "determined.get_experiment(ended.id)", "v.name == 'short'"),
    Call(
        "Determined.list_experiments",
        "determined.list_experiments(experiment_ids=[ended.id])",
        "[one.id for one in v] == [ended.id]",
    ),
    Call("Experiment.reload", "ended.reload()", "ended.name == 'short'"),
    Call("Experiment.id", "ended.id", "v == 1"),
    Call("Experiment.wait", "ended.wait(interval=0.1)", "v is client.ExperimentState.COMPLETED"),
    Call("Experiment.await_first_trial", "ended.await_first_trial()", "v.id == trial.id"),
    Call("Experiment.get_trials", "ended.get_trials()", "[one.id for one in v] == [trial.id]"),
    Call(
        "Experiment.list_trials",
        "ended.list_trials(sort_by=client.TrialSortBy.START_TIME)",
        "[one.id for one in v] == [trial.id]",
    ),
    Call("Experiment.iter_trials", "list(ended.iter_trials(limit=1))", "[one.id for one in v] == [trial.id]"),
    Call(
        "Experiment.list_checkpoints",
        "ended.list_checkpoints(max_results=1)",
        "v[0].uuid == checkpoints[0].uuid",
    ),
    Call("Experiment.top_checkpoint", "ended.top_checkpoint()", "v.uuid == checkpoints[0].uuid"),
    Call(
        "Experiment.top_n_checkpoints",
        "ended.top_n_checkpoints(2, sort_by='score', smaller_is_better=False)",
        "[one.uuid for one in v] == [checkpoints[0].uuid]",
    ),
    Call("Experiment.download_code", "ended.download_code(str(out))", "Path(v).stat().st_size > 0"),
    Call("Experiment.set_name", "ended.set_name('renamed')", "fresh(ended).name == 'renamed'"),
    Call("Experiment.set_description", "ended.set_description('d')", "fresh(ended).description == 'd'"),
    Call("Experiment.set_notes", "ended.set_notes('n')", "fresh(ended).notes == 'n'"),
    Call("Experiment.set_labels", "ended.set_labels({'a', 'b'})", "fresh(ended).labels == {'a', 'b'}"),
    Call("Experiment.add_label", "ended.add_label('c')", "'c' in fresh(ended).labels"),
    Call("Experiment.remove_label", "ended.remove_label('c')", "'c' not in fresh(ended).labels"),
    Call(
        "Experiment.move_to_project",
        "ended.move_to_project('lab', 'numbers')",
        "fresh(ended).project_id == project.id",
    ),
    Call("Project.list_experiments", "project.list_experiments()", "[one.id for one in v] == [ended.id]"),
    Call("Experiment.archive", "ended.archive()", "fresh(ended).archived"),
    Call("Experiment.unarchive", "ended.unarchive()", "not fresh(ended).archived"),
    Call(
        "Experiment.delete_tensorboard_files",
        "ended.delete_tensorboard_files()",
        "soon(lambda: not event_files(ended))",
    ),
    Call("Experiment.pause", "long.pause()", "state(long) == 'PAUSED'"),
    Call(
        "Experiment.activate", "long.activate()", "state(long) in ('ACTIVE', 'QUEUED', 'STARTING', 'RUNNING')"
    ),
    Call("Experiment.cancel", "long.cancel()", "state(long) in ('STOPPING_CANCELED', 'CANCELED')"),
    Call(
        "Experiment.get_pachyderm_config",
        "spare.get_pachyderm_config()",
        "v['dataset']['commit'] == 'c0ffee'",
    ),
    # Trials and metrics
    Call("Determined.get_trial", "determined.get_trial(trial.id)", "v.experiment_id == ended.id"),
    Call("Trial.reload", "trial.reload()", "trial.state is client.TrialState.COMPLETED"),
    Call("Trial.get_experiment", "trial.get_experiment()", "v.id == ended.id"),
    Call("Trial.iter_logs", "list(trial.iter_logs(search_text='batch 2'))", "len(v) == 1"),
    Call("Trial.logs", "list(trial.logs(tail=3))", "len(v) == 3"),
    Call("Trial.iter_metrics", "steps(trial.iter_metrics('validation'))", "v == [1, 2, 3, 4]"),
    Call("Trial.stream_metrics", "steps(trial.stream_metrics('training'))", "v == [1, 2, 3, 4]"),
    Call("Trial.stream_training_metrics", "steps(trial.stream_training_metrics())", "v == [1, 2, 3, 4]"),
    Call("Trial.stream_validation_metrics", "steps(trial.stream_validation_metrics())", "v == [1, 2, 3, 4]"),
    Call(
        "Determined.iter_trials_metrics",
        "steps(determined.iter_trials_metrics([trial.id], 'training'))",
        "v == [1, 2, 3, 4]",
    ),
    Call(
        "Determined.stream_trials_metrics",
        "steps(determined.stream_trials_metrics([trial.id], 'validation'))",
        "v == [1, 2, 3, 4]",
    ),
    Call(
        "Determined.stream_trials_training_metrics",
        "steps(determined.stream_trials_training_metrics([trial.id]))",
        "v == [1, 2, 3, 4]",
    ),
    Call(
        "Determined.stream_trials_validation_metrics",
        "steps(determined.stream_trials_validation_metrics([trial.id]))",
        "v == [1, 2, 3, 4]",
    ),
    Call("TrialMetrics.total_batches", "next(iter(trial.iter_metrics('training'))).total_batches", "v == 1"),
    Call("Trial.get_checkpoints", "trial.get_checkpoints()", "len(v) == 4"),
    Call(
        "Trial.list_checkpoints", "trial.list_checkpoints(max_results=2)", "v[0].uuid == checkpoints[0].uuid"
    ),
    Call("Trial.top_checkpoint", "trial.top_checkpoint()", "v.uuid == checkpoints[0].uuid"),
    Call("Trial.select_checkpoint", "trial.select_checkpoint(latest=True)", "v.uuid == checkpoints[0].uuid"),
    # Checkpoints
    Call(
        "Determined.get_checkpoint",
        "determined.get_checkpoint(checkpoints[0].uuid)",
        "v.training.trial_id == trial.id",
    ),
    Call("Checkpoint.reload", "checkpoints[0].reload()", "checkpoints[0].metadata['steps_completed'] == 4"),
    Call(
        "Checkpoint.download",
        "checkpoints[0].download(str(out / 'downloaded'))",
        "(Path(v) / 'weights.txt').read_text() == '4'",
    ),
    Call(
        "Checkpoint.write_metadata_file",
        "checkpoints[0].write_metadata_file(str(out / 'metadata.json'))",
        "json.loads((out / 'metadata.json').read_text())['steps_completed'] == 4",
    ),
    Call(
        "Checkpoint.add_metadata",
        "checkpoints[0].add_metadata({'a': 1})",
        "fresh(checkpoints[0]).metadata['a'] == 1",
    ),
    Call(
        "Checkpoint.remove_metadata",
        "checkpoints[0].remove_metadata(['a'])",
        "'a' not in fresh(checkpoints[0]).metadata",
    ),
    Call("Checkpoint.get_metrics", "list(checkpoints[0].get_metrics())", "v == []"),
    Call("Checkpoint.get_pachyderm_commit", "checkpoints[0].get_pachyderm_commit()", "v == 'c0ffee'"),
    Call(
        "Checkpoint.remove_files",
        "checkpoints[3].remove_files(['weights*'])",
        "soon(lambda: state(checkpoints[3]) == 'PARTIALLY_DELETED')",
    ),
    Call("Checkpoint.delete", "checkpoints[2].delete()", "soon(lambda: state(checkpoints[2]) == 'DELETED')"),
    # Models
    Call(
        "Determined.create_model",
        "determined.create_model('net', 'd', {'a': 1}, ['x'])",
        "v.labels == ['x']",
        keeps="model",
    ),
    Call("Determined.get_model", "determined.get_model('net')", "v.model_id == model.model_id"),
    Call("Determined.get_model_by_id", "determined.get_model_by_id(model.model_id)", "v.name == 'net'"),
    Call("Determined.get_models", "determined.get_models(name='net')", "[one.name for one in v] == ['net']"),
    Call(
        "Determined.list_models",
        "determined.list_models(description='d')",
        "[one.name for one in v] == ['net']",
    ),
    Call("Determined.get_model_labels", "determined.get_model_labels()", "v == ['x']"),
    Call("Model.set_labels", "model.set_labels(['y'])", "fresh(model).labels == ['y']"),
    Call("Model.set_description", "model.set_description('e')", "fresh(model).description == 'e'"),
    Call("Model.add_metadata", "model.add_metadata({'b': 2})", "fresh(model).metadata == {'a': 1, 'b': 2}"),
    Call("Model.remove_metadata", "model.remove_metadata(['a'])", "fresh(model).metadata == {'b': 2}"),
    Call("Model.reload", "model.reload()", "model.name == 'net'"),
    Call(
        "Model.move_to_workspace",
        "model.move_to_workspace('lab')",
        "fresh(model).workspace_id == workspace.id",
    ),
    Call("Model.archive", "model.archive()", "fresh(model).archived"),
    Call("Model.unarchive", "model.unarchive()", "not fresh(model).archived"),
    Call(
        "Model.register_version",
        "model.register_version(checkpoints[0].uuid)",
        "v.model_version == 1",
        keeps="version",
    ),
    Call("Model.get_version", "model.get_version()", "v.model_version == 1"),
    Call("Model.get_versions", "model.get_versions()", "len(v) == 1"),
    Call("Model.list_versions", "list(model.list_versions())", "len(v) == 1"),
    Call("ModelVersion.set_name", "version.set_name('first')", "fresh(version).name == 'first'"),
    Call("ModelVersion.set_notes", "version.set_notes('n')", "fresh(version).notes == 'n'"),
    Call("ModelVersion.reload", "version.reload()", "version.checkpoint.uuid == checkpoints[0].uuid"),
    Call("ModelVersion.get_metrics", "list(version.get_metrics())", "v == []"),
    Call("ModelVersion.iter_metrics", "list(version.iter_metrics())", "v == []"),
    Call("ModelVersion.delete", "version.delete()", "model.get_versions() == []"),
    Call("Model.delete", "model.delete()", "determined.list_models() == []"),
    # What is not offered
    _no("ResourcePool.add_bindings", "pool.add_bindings(['lab'])", _BINDINGS),
    _no("ResourcePool.remove_bindings", "pool.remove_bindings(['lab'])", _BINDINGS),
    _no("ResourcePool.replace_bindings", "pool.replace_bindings(['lab'])", _BINDINGS),
    Call("ResourcePool.list_workspaces", "pool.list_workspaces()", "v == []"),
    _no("Determined.add_oauth_client", "determined.add_oauth_client('http://localhost', 'app')", _SSO, ""),
    _no("Determined.list_oauth_clients", "determined.list_oauth_clients()", _SSO, ""),
    _no("Determined.remove_oauth_client", "determined.remove_oauth_client('1')", _SSO, ""),
    # The functions of the client module
    Call("client.login", "client.login(live.master.address, 'admin', live.master.password('admin'))"),
    Call("client.whoami", "client.whoami()", "v.username == 'admin'"),
    Call("client.get_session_username", "client.get_session_username()", "v == 'admin'"),
    Call("client.list_users", "client.list_users()", "len(v) == 3"),
    Call("client.get_user_by_id", "client.get_user_by_id(user.user_id)", "v.username == 'ada2'"),
    Call("client.get_user_by_name", "client.get_user_by_name('ada2')", "v.user_id == user.user_id"),
    Call(
        "client.create_user",
        "client.create_user('eve', False, 'Secret-word-1')",
        "v.username == 'eve'",
    ),
    Call("client.create_experiment", "client.create_experiment(config(), str(out / 'context'))", "v.id > 3"),
    Call("client.get_experiment", "client.get_experiment(ended.id)", "v.name == 'renamed'"),
    Call(
        "client.list_experiments",
        "client.list_experiments(labels=['a'])",
        "[one.id for one in v] == [ended.id]",
    ),
    Call("client.get_trial", "client.get_trial(trial.id)", "v.experiment_id == ended.id"),
    Call(
        "client.get_checkpoint",
        "client.get_checkpoint(checkpoints[0].uuid)",
        "v.task_id == checkpoints[0].task_id",
    ),
    Call("client.create_workspace", "client.create_workspace('gone')", "v.name == 'gone'"),
    Call("client.get_workspace", "client.get_workspace('gone')", "v.name == 'gone'"),
    Call("client.list_workspaces", "client.list_workspaces()", "len(v) == 3"),
    Call("client.delete_workspace", "client.delete_workspace('gone')", "len(client.list_workspaces()) == 2"),
    Call("client.create_model", "client.create_model('second')", "v.name == 'second'"),
    Call("client.get_model", "client.get_model('second')", "v.name == 'second'"),
    Call(
        "client.get_model_by_id",
        "client.get_model_by_id(client.get_model('second').model_id)",
        "v.name == 'second'",
    ),
    Call("client.get_models", "client.get_models()", "len(v) == 1"),
    Call("client.list_models", "client.list_models()", "len(v) == 1"),
    Call("client.get_model_labels", "client.get_model_labels()", "v == []"),
    Call(
        "client.iter_trials_metrics",
        "steps(client.iter_trials_metrics([trial.id], 'training'))",
        "v == [1, 2, 3, 4]",
    ),
    Call(
        "client.stream_trials_metrics",
        "steps(client.stream_trials_metrics([trial.id], 'training'))",
        "v == [1, 2, 3, 4]",
    ),
    Call(
        "client.stream_trials_training_metrics",
        "steps(client.stream_trials_training_metrics([trial.id]))",
        "v == [1, 2, 3, 4]",
    ),
    Call(
        "client.stream_trials_validation_metrics",
        "steps(client.stream_trials_validation_metrics([trial.id]))",
        "v == [1, 2, 3, 4]",
    ),
    _no("client.add_oauth_client", "client.add_oauth_client('http://localhost', 'app')", _SSO, ""),
    _no("client.list_oauth_clients", "client.list_oauth_clients()", _SSO, ""),
    _no("client.remove_oauth_client", "client.remove_oauth_client('1')", _SSO, ""),
    # The end of things
    Call("Trial.kill", "spare.get_trials()[0].kill()", "state(spare) == 'CANCELED'"),
    Call("Experiment.kill", "created.kill()", "soon(lambda: state(created) == 'CANCELED')"),
    Call(
        "Experiment.delete",
        "spare.delete()",
        "soon(lambda: spare.id not in ids(determined.list_experiments()))",
    ),
    Call(
        "Workspace.delete_project",
        "(ended.move_to_project('Uncategorized', 'Uncategorized'), workspace.delete_project('numbers'))",
        "workspace.list_projects() == []",
    ),
    Call(
        "Determined.delete_workspace",
        "determined.delete_workspace('lab')",
        "'lab' not in [one.name for one in determined.list_workspaces()]",
    ),
    Call("Determined.logout", "determined.logout()", "refuses(determined.whoami)"),
    Call("client.logout", "client.logout()", "refuses(admin.whoami)"),
)
