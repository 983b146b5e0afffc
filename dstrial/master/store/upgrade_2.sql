-- From schema version 1 to 2: projects of one's own, templates, registered models, and what deleted experiments have used.

ALTER TABLE experiments ADD COLUMN project_id INTEGER NOT NULL DEFAULT 1;
ALTER TABLE experiments ADD COLUMN template TEXT;
ALTER TABLE checkpoints ADD COLUMN deleting_us INTEGER;
CREATE INDEX experiments_by_project ON experiments (project_id);

CREATE TABLE work_of_2 (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    kind          TEXT    NOT NULL,               -- as store/work.py lists them
    experiment_id INTEGER NOT NULL,               -- 0 for projects and workspaces
    payload       TEXT    NOT NULL DEFAULT '{}',
    created_us    INTEGER NOT NULL
);
INSERT INTO work_of_2 (id, kind, experiment_id, payload, created_us)
    SELECT id, kind, experiment_id, payload, created_us FROM work;
DROP TABLE work;
ALTER TABLE work_of_2 RENAME TO work;

-- Workspace 1 and project 1 hold what was submitted without a project.
CREATE TABLE workspaces (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    name               TEXT    NOT NULL UNIQUE COLLATE NOCASE,
    owner_id           INTEGER NOT NULL,
    created_us         INTEGER NOT NULL,
    is_immutable       INTEGER NOT NULL DEFAULT 0,
    is_archived        INTEGER NOT NULL DEFAULT 0,
    state              TEXT    NOT NULL DEFAULT 'UNSPECIFIED',   -- or DELETING, DELETE_FAILED
    error              TEXT    NOT NULL DEFAULT '',  -- why it could not be deleted
    checkpoint_storage TEXT,                      -- JSON, of its experiments that name none; NULL: the master's
    agent_user_group   TEXT                       -- JSON, kept and shown
);
INSERT INTO workspaces (id, name, owner_id, created_us, is_immutable) VALUES (1, 'Uncategorized', 1, 0, 1);

CREATE TABLE workspace_pins (
    user_id      INTEGER NOT NULL,
    workspace_id INTEGER NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
    pinned_us    INTEGER NOT NULL,
    PRIMARY KEY (user_id, workspace_id)
) WITHOUT ROWID;

CREATE TABLE projects (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    workspace_id INTEGER NOT NULL REFERENCES workspaces (id),
    name         TEXT    NOT NULL COLLATE NOCASE,
    key          TEXT    NOT NULL UNIQUE COLLATE NOCASE,   -- up to five letters and digits
    description  TEXT    NOT NULL DEFAULT '',
    notes        TEXT    NOT NULL DEFAULT '[]',   -- JSON [{name, contents}]
    owner_id     INTEGER NOT NULL,
    created_us   INTEGER NOT NULL,
    is_immutable INTEGER NOT NULL DEFAULT 0,
    is_archived  INTEGER NOT NULL DEFAULT 0,      -- by itself; an archived workspace archives all of its own
    state        TEXT    NOT NULL DEFAULT 'UNSPECIFIED',   -- or DELETING, DELETE_FAILED
    error        TEXT    NOT NULL DEFAULT '',
    UNIQUE (workspace_id, name)
);
INSERT INTO projects (id, workspace_id, name, key, owner_id, created_us, is_immutable)
    VALUES (1, 1, 'Uncategorized', 'UNC', 1, 0, 1);

CREATE TABLE templates (
    name         TEXT    PRIMARY KEY,
    config       TEXT    NOT NULL,                -- JSON, a part of an experiment config
    workspace_id INTEGER NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE
) WITHOUT ROWID;

CREATE TABLE models (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    name         TEXT    NOT NULL UNIQUE COLLATE NOCASE,
    description  TEXT    NOT NULL DEFAULT '',
    notes        TEXT    NOT NULL DEFAULT '',
    metadata     TEXT    NOT NULL DEFAULT '{}',   -- JSON
    labels       TEXT    NOT NULL DEFAULT '[]',   -- JSON list
    owner_id     INTEGER NOT NULL REFERENCES users (id),
    workspace_id INTEGER NOT NULL REFERENCES workspaces (id),
    is_archived  INTEGER NOT NULL DEFAULT 0,
    last_version INTEGER NOT NULL DEFAULT 0,      -- of all that there ever were; numbers are not used again
    created_us   INTEGER NOT NULL,
    updated_us   INTEGER NOT NULL
);

CREATE TABLE model_versions (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    model_id        INTEGER NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    version         INTEGER NOT NULL,
    checkpoint_uuid TEXT    NOT NULL,
    name            TEXT    NOT NULL DEFAULT '',
    comment         TEXT    NOT NULL DEFAULT '',
    notes           TEXT    NOT NULL DEFAULT '',
    metadata        TEXT    NOT NULL DEFAULT '{}',   -- JSON
    labels          TEXT    NOT NULL DEFAULT '[]',   -- JSON list
    owner_id        INTEGER NOT NULL REFERENCES users (id),
    created_us      INTEGER NOT NULL,
    updated_us      INTEGER NOT NULL,
    UNIQUE (model_id, version)
);
CREATE INDEX model_versions_by_checkpoint ON model_versions (checkpoint_uuid);

-- What allocations of deleted experiments have used, for the reports of usage.
CREATE TABLE past_usage (
    allocation_id  TEXT    PRIMARY KEY,
    kind           TEXT    NOT NULL,              -- of the task: TRIAL
    user_id        INTEGER NOT NULL,
    experiment_id  INTEGER NOT NULL,
    workspace_name TEXT    NOT NULL,
    labels         TEXT    NOT NULL,              -- JSON list
    num_slots      INTEGER NOT NULL,
    start_us       INTEGER NOT NULL,
    end_us         INTEGER NOT NULL
) WITHOUT ROWID;

-- The same for versions of registered models.
CREATE TABLE trial_source_versions (
    model_id INTEGER NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    version  INTEGER NOT NULL,
    trial_id INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    type     TEXT    NOT NULL,
    PRIMARY KEY (model_id, version, trial_id, type)
) WITHOUT ROWID;
