-- From schema version 2 to 3: detached runs.

ALTER TABLE experiments ADD COLUMN external_id TEXT;
CREATE UNIQUE INDEX experiments_by_external_id ON experiments (external_id) WHERE external_id IS NOT NULL;
ALTER TABLE trials ADD COLUMN heartbeat_us INTEGER;
ALTER TABLE trials ADD COLUMN is_lost INTEGER NOT NULL DEFAULT 0;
CREATE UNIQUE INDEX trials_by_external_id ON trials (experiment_id, external_id) WHERE external_id IS NOT NULL;

-- Commands, TensorBoards and generic tasks.
CREATE TABLE commands (
    task_id        TEXT    PRIMARY KEY,           -- a UUID, in tasks as well
    kind           TEXT    NOT NULL,              -- COMMAND TENSORBOARD GENERIC, as the task's type
    job_id         TEXT    NOT NULL UNIQUE,
    state          TEXT    NOT NULL,              -- ACTIVE PAUSED STOPPING_{PAUSED,CANCELED} COMPLETED CANCELED ERROR
    description    TEXT    NOT NULL,
    config         TEXT    NOT NULL,              -- JSON, fully defaulted
    owner_id       INTEGER NOT NULL REFERENCES users (id),
    workspace_id   INTEGER NOT NULL,
    num_slots      INTEGER NOT NULL,
    priority       INTEGER NOT NULL DEFAULT 42,   -- 1 is the most urgent
    queue_position REAL    NOT NULL,              -- among those of experiments
    run_id         INTEGER NOT NULL DEFAULT 0,    -- allocations so far
    is_pausable    INTEGER NOT NULL DEFAULT 0,
    parent_id      TEXT,                          -- the generic task that it was made by
    forked_from    TEXT,                          -- the generic task that it is a copy of
    experiment_ids TEXT    NOT NULL DEFAULT '[]', -- JSON list, what a TensorBoard shows
    trial_ids      TEXT    NOT NULL DEFAULT '[]', -- JSON list
    stop_reason    TEXT,                          -- why it was stopped, NULL if nobody has
    exit_status    TEXT,                          -- how its last allocation ended, one sentence
    start_us       INTEGER NOT NULL,
    end_us         INTEGER
) WITHOUT ROWID;
CREATE INDEX commands_by_state ON commands (state);
CREATE INDEX commands_by_parent ON commands (parent_id);

CREATE TABLE command_contexts (
    task_id TEXT PRIMARY KEY,
    tgz     BLOB NOT NULL                         -- gzip tar of what the client sent along
);

CREATE INDEX allocations_by_task ON allocations (task_id);
