-- schema version 16
BEGIN TRANSACTION;
CREATE TABLE access_tokens (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    token_hash  TEXT    NOT NULL UNIQUE,          -- SHA-256, as in tokens
    user_id     INTEGER NOT NULL REFERENCES users (id),
    description TEXT    NOT NULL DEFAULT '',
    created_us  INTEGER NOT NULL,
    expires_us  INTEGER,                          -- NULL: never
    revoked_us  INTEGER                           -- NULL: not revoked
);
CREATE TABLE allocation_nodes (
    allocation_id TEXT    NOT NULL REFERENCES allocations (id) ON DELETE CASCADE,
    node_id       INTEGER NOT NULL,
    rank          INTEGER NOT NULL,               -- rank of the node, from 0
    pid           INTEGER,                        -- pid of the supervisor there
    start_time    TEXT,                           -- start time of that process, from its /proc
    log_offset    INTEGER NOT NULL DEFAULT 0,     -- bytes of its log that are stored in logs
    log_lines     INTEGER NOT NULL DEFAULT 0,     -- number of lines in its log up to log_offset
    exit_code     INTEGER,                        -- as in a shell
    signal        INTEGER,                        -- signal that ended it
    cause         TEXT,                           -- exited lost unreachable preempted refused
    PRIMARY KEY (allocation_id, node_id)
) WITHOUT ROWID;
CREATE TABLE allocations (
    id                TEXT    PRIMARY KEY,        -- {task_id}.{run_id}
    task_id           TEXT    NOT NULL,
    trial_id          INTEGER NOT NULL,           -- 0 for a command
    experiment_id     INTEGER NOT NULL,           -- 0 for a command
    run_id            INTEGER NOT NULL,
    state             TEXT    NOT NULL,           -- ASSIGNED RUNNING TERMINATED
    slots             TEXT    NOT NULL,           -- JSON list of slot ids
    ports             TEXT    NOT NULL,           -- JSON {variable: port}
    resources_id      TEXT    NOT NULL,           -- also the container id, a UUID
    directory         TEXT    NOT NULL,           -- absolute, below the state directory
    supervisor_pid    INTEGER,
    supervisor_start  TEXT,                       -- start time of that process, from /proc
    is_ready          INTEGER NOT NULL DEFAULT 0, -- whether the task has reported that it is ready
    steps_at_start    INTEGER NOT NULL DEFAULT 0, -- steps_completed of the checkpoint from which it started
    checkpoint_uuid   TEXT,                       -- DET_LATEST_CHECKPOINT
    preempt_us        INTEGER,                    -- time of the request to save a checkpoint and stop
    preempt_deadline_us INTEGER,
    preempt_acked     INTEGER NOT NULL DEFAULT 0,
    kill_us           INTEGER,                    -- time of the request to kill it
    kill_reason       TEXT,
    num_reports       INTEGER NOT NULL DEFAULT 0, -- number of metric reports of this run
    log_offset        INTEGER NOT NULL DEFAULT 0, -- bytes of its log file that are stored in logs
    start_us          INTEGER NOT NULL,
    end_us            INTEGER,
    exit_code         INTEGER,                    -- as in a shell
    exit_reason       TEXT,
    workspace_name    TEXT,                       -- workspace of its experiment or command at its start
    log_lines         INTEGER NOT NULL DEFAULT 0  -- number of lines in its log file up to log_offset
) WITHOUT ROWID;
CREATE TABLE checkpoints (
    uuid          TEXT    PRIMARY KEY,
    experiment_id INTEGER NOT NULL,
    trial_id      INTEGER NOT NULL,
    task_id       TEXT    NOT NULL,
    allocation_id TEXT,
    run_id        INTEGER NOT NULL,
    state         TEXT    NOT NULL,               -- COMPLETED ERROR DELETED PARTIALLY_DELETED
    steps         INTEGER NOT NULL,               -- metadata.steps_completed
    resources     TEXT    NOT NULL,               -- JSON {path: bytes}
    metadata      TEXT    NOT NULL,               -- JSON
    size          INTEGER NOT NULL,               -- bytes
    report_us     INTEGER NOT NULL,
    deleting_us   INTEGER,                        -- start of the deletion of its files; NULL: not being deleted
    manifest_sha256 TEXT                          -- hash of its manifest, as reported at first; NULL: not reported
) WITHOUT ROWID;
CREATE TABLE cluster (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE command_contexts (
    task_id TEXT PRIMARY KEY,
    tgz     BLOB NOT NULL                         -- gzip tar of the client's files
);
CREATE TABLE commands (
    task_id        TEXT    PRIMARY KEY,           -- a UUID, also in tasks
    kind           TEXT    NOT NULL,              -- COMMAND TENSORBOARD GENERIC, equal to tasks.type
    job_id         TEXT    NOT NULL UNIQUE,
    state          TEXT    NOT NULL,              -- ACTIVE PAUSED STOPPING_{PAUSED,CANCELED} COMPLETED CANCELED ERROR
    description    TEXT    NOT NULL,
    config         TEXT    NOT NULL,              -- JSON, fully defaulted
    owner_id       INTEGER NOT NULL REFERENCES users (id),
    workspace_id   INTEGER NOT NULL,
    num_slots      INTEGER NOT NULL,
    priority       INTEGER NOT NULL DEFAULT 42,   -- 1 is the most urgent
    queue_position REAL    NOT NULL,              -- in one queue with experiments
    run_id         INTEGER NOT NULL DEFAULT 0,    -- number of allocations so far
    is_pausable    INTEGER NOT NULL DEFAULT 0,
    parent_id      TEXT,                          -- generic task that created it
    forked_from    TEXT,                          -- generic task of which it is a copy
    experiment_ids TEXT    NOT NULL DEFAULT '[]', -- JSON list, experiments that a TensorBoard shows
    trial_ids      TEXT    NOT NULL DEFAULT '[]', -- JSON list
    stop_reason    TEXT,                          -- why it was stopped; NULL if it was not
    exit_status    TEXT,                          -- how its last allocation ended, one sentence
    start_us       INTEGER NOT NULL,
    end_us         INTEGER,
    original_config TEXT                          -- JSON as submitted, of generic tasks only
) WITHOUT ROWID;
CREATE TABLE disabled_slots (
    slot_id INTEGER PRIMARY KEY,
    drain   INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE excluded_nodes (
    trial_id INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    node_id  INTEGER NOT NULL,
    PRIMARY KEY (trial_id, node_id)
) WITHOUT ROWID;
CREATE TABLE experiments (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id             TEXT    NOT NULL UNIQUE,
    state              TEXT    NOT NULL,          -- ACTIVE PAUSED STOPPING_{COMPLETED,CANCELED,ERROR,KILLED} COMPLETED CANCELED ERROR DELETING DELETE_FAILED
    name               TEXT    NOT NULL,
    description        TEXT    NOT NULL DEFAULT '',
    notes              TEXT    NOT NULL DEFAULT '',
    labels             TEXT    NOT NULL DEFAULT '[]',   -- JSON list, sorted
    owner_id           INTEGER NOT NULL REFERENCES users (id),
    archived           INTEGER NOT NULL DEFAULT 0,
    parent_id          INTEGER,
    unmanaged          INTEGER NOT NULL DEFAULT 0,
    searcher_type      TEXT    NOT NULL,          -- config.searcher.name
    searcher_metric    TEXT    NOT NULL,          -- config.searcher.metric
    smaller_is_better  INTEGER NOT NULL,
    priority           INTEGER NOT NULL DEFAULT 42,     -- 1 is the most urgent
    weight             REAL    NOT NULL DEFAULT 1,
    max_slots          INTEGER,
    slots_per_trial    INTEGER NOT NULL,
    queue_position     REAL    NOT NULL,          -- within a priority; submission order unless moved
    progress           REAL    NOT NULL DEFAULT 0,
    num_trials         INTEGER NOT NULL DEFAULT 0,      -- updated, like the next two, by triggers on trials
    checkpoint_count   INTEGER NOT NULL DEFAULT 0,
    checkpoint_size    INTEGER NOT NULL DEFAULT 0,      -- bytes
    start_us           INTEGER NOT NULL,
    end_us             INTEGER,
    end_reason         TEXT,                      -- why it ended in ERROR or was cancelled, one sentence
    log_retention_days INTEGER,                   -- NULL: the master's; -1: forever
    best_trial_id      INTEGER,                   -- trial with the best validation
    best_metric        REAL,
    interpreter        TEXT,                      -- DET_PYTHON_EXECUTABLE chosen at submission, NULL: the master's
    project_id         INTEGER NOT NULL DEFAULT 1,
    external_id        TEXT,                      -- id chosen by detached runs, to find the experiment again
    -- Long texts come last: reading a column after them reads their overflow pages.
    config             TEXT    NOT NULL,          -- JSON, fully defaulted
    original_config    TEXT    NOT NULL,          -- YAML as submitted
    searcher_snapshot  TEXT,                      -- JSON; NULL for unmanaged experiments
    template           TEXT                       -- JSON, the template's config at the submission; NULL for none
);
CREATE TABLE log_sizes (
    id           INTEGER PRIMARY KEY,
    task_id      TEXT    NOT NULL,                -- a trial's first task with output
    trial_id     INTEGER,                         -- NULL: a task without a trial
    num_bytes    INTEGER NOT NULL,                -- size of the kept lines of its processes, with their rows
    is_cut       INTEGER NOT NULL DEFAULT 0       -- whether lines were deleted because of the quota
);
CREATE TABLE logs (
    id            INTEGER PRIMARY KEY,
    task_id       TEXT    NOT NULL,
    trial_id      INTEGER,
    allocation_id TEXT,
    time_us       INTEGER NOT NULL,
    level         TEXT,                           -- TRACE DEBUG INFO WARNING ERROR CRITICAL, NULL unknown
    rank          INTEGER,
    source        TEXT    NOT NULL,               -- task, master
    stdtype       TEXT,                           -- stdout, stderr, NULL for the master's
    log           TEXT    NOT NULL                -- raw text with its newline
);
CREATE TABLE metric_summaries (
    trial_id   INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    group_name TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    summary    TEXT    NOT NULL,                  -- JSON {count,sum,mean,min,max,last,type}
    PRIMARY KEY (trial_id, group_name, name)
) WITHOUT ROWID;
CREATE TABLE metrics (
    id         INTEGER PRIMARY KEY,
    trial_id   INTEGER NOT NULL,
    run_id     INTEGER NOT NULL,
    group_name TEXT    NOT NULL,
    steps      INTEGER NOT NULL,                  -- total batches; -1 if the report has none (profiling)
    end_us     INTEGER NOT NULL,
    metrics    TEXT    NOT NULL,                  -- JSON object; NaN and infinities as "NaN", "Infinity", "-Infinity"
    per_batch  TEXT,                              -- JSON list of objects, one per batch since the last report
    archived   INTEGER NOT NULL DEFAULT 0         -- whether a later run resumed before these steps
);
CREATE TABLE model_definitions (
    experiment_id INTEGER PRIMARY KEY REFERENCES experiments (id) ON DELETE CASCADE,
    tgz           BLOB    NOT NULL                -- gzip tar; empty for none
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
    last_version INTEGER NOT NULL DEFAULT 0,      -- highest version ever, because numbers are not reused
    created_us   INTEGER NOT NULL,
    updated_us   INTEGER NOT NULL
);
CREATE TABLE nodes (
    id   INTEGER PRIMARY KEY AUTOINCREMENT,       -- from 1; 0 is the master's machine. The ids of a node's slots start at id * 1024
    name TEXT    NOT NULL UNIQUE                  -- ssh's destination
);
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
    is_archived  INTEGER NOT NULL DEFAULT 0,      -- its own flag; projects of an archived workspace count as archived
    state        TEXT    NOT NULL DEFAULT 'UNSPECIFIED',   -- or DELETING, DELETE_FAILED
    error        TEXT    NOT NULL DEFAULT '',
    UNIQUE (workspace_id, name)
);
INSERT INTO "projects" VALUES(1,1,'Uncategorized','UNC','','[]',1,0,1,0,'UNSPECIFIED','');
CREATE TABLE tasks (
    id            TEXT    PRIMARY KEY,
    type          TEXT    NOT NULL,               -- TRIAL COMMAND TENSORBOARD GENERIC
    experiment_id INTEGER,
    trial_id      INTEGER,
    start_us      INTEGER NOT NULL,
    end_us        INTEGER
) WITHOUT ROWID;
CREATE TABLE templates (
    name         TEXT    PRIMARY KEY,
    config       TEXT    NOT NULL,                -- JSON, a part of an experiment config
    workspace_id INTEGER NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE TABLE tokens (
    token_hash    TEXT    PRIMARY KEY,
    kind          TEXT    NOT NULL CHECK (kind IN ('user', 'allocation')),
    user_id       INTEGER NOT NULL REFERENCES users (id),
    allocation_id TEXT,
    created_us    INTEGER NOT NULL,
    expires_us    INTEGER
) WITHOUT ROWID;
CREATE TABLE trial_source_versions (
    model_id INTEGER NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    version  INTEGER NOT NULL,
    trial_id INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    type     TEXT    NOT NULL,
    PRIMARY KEY (model_id, version, trial_id, type)
) WITHOUT ROWID;
CREATE TABLE trial_sources (
    checkpoint_uuid TEXT    NOT NULL,
    trial_id        INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    type            TEXT    NOT NULL,             -- TRIAL_SOURCE_INFO_TYPE_INFERENCE, …_FINE_TUNING
    PRIMARY KEY (checkpoint_uuid, trial_id, type)
) WITHOUT ROWID;
CREATE TABLE trials (
    id                     INTEGER PRIMARY KEY AUTOINCREMENT,
    experiment_id          INTEGER NOT NULL REFERENCES experiments (id) ON DELETE CASCADE,
    request_id             TEXT    NOT NULL,      -- the searcher's id of the trial, a UUID
    state                  TEXT    NOT NULL,      -- as experiments, without DELETING
    hparams                TEXT    NOT NULL,      -- JSON
    seed                   INTEGER NOT NULL,
    task_id                TEXT    NOT NULL,      -- current task: {experiment}.{request_id}[-n]
    run_id                 INTEGER NOT NULL DEFAULT 0,  -- number of allocations so far
    restarts               INTEGER NOT NULL DEFAULT 0,
    progress               REAL    NOT NULL DEFAULT 0,
    total_batches          INTEGER NOT NULL DEFAULT 0,
    runner_state           TEXT    NOT NULL DEFAULT 'UNSPECIFIED',
    start_us               INTEGER NOT NULL,
    end_us                 INTEGER,
    searcher_metric_value  REAL,                  -- the metric's value in the best validation, as reported
    best_validation_id     INTEGER,               -- metrics.id
    latest_validation_id   INTEGER,               -- metrics.id
    best_checkpoint_uuid   TEXT,
    checkpoint_count       INTEGER NOT NULL DEFAULT 0,
    checkpoint_size        INTEGER NOT NULL DEFAULT 0,   -- bytes of its COMPLETED and PARTIALLY_DELETED checkpoints
    warm_start_uuid        TEXT,
    metadata               TEXT,                  -- JSON of runs/{id}/metadata
    log_policy_matched     TEXT,
    early_exit             TEXT,                  -- INVALID_HP or NULL
    is_stopped_by_searcher INTEGER NOT NULL DEFAULT 0,
    is_closed              INTEGER NOT NULL DEFAULT 0,   -- whether the searcher was notified of its exit
    retry_cancelled        INTEGER NOT NULL DEFAULT 0,   -- whether a cancel_retries policy matched
    last_failure           TEXT,                  -- fingerprint of the last failure before a first batch
    log_retention_days     INTEGER,
    external_id            TEXT,                  -- id chosen by a detached run, to find the trial again
    heartbeat_us           INTEGER,               -- a detached run's last heartbeat; NULL for other trials
    is_lost                INTEGER NOT NULL DEFAULT 0,   -- whether it ended in ERROR for lack of heartbeats
    is_node_excluded       INTEGER NOT NULL DEFAULT 0,   -- 1: an exclude_node policy matched; 2: and the trial has failed since, so it applies
    num_metric_names       INTEGER NOT NULL DEFAULT 0,   -- number of rows in metric_summaries
    UNIQUE (experiment_id, request_id)
);
CREATE TABLE users (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    username      TEXT    NOT NULL UNIQUE COLLATE NOCASE,
    display_name  TEXT    NOT NULL DEFAULT '',
    password_hash TEXT    NOT NULL DEFAULT '',   -- hash of the client's salted hash; '' is a blank password
    admin         INTEGER NOT NULL DEFAULT 0,
    active        INTEGER NOT NULL DEFAULT 1,
    modified_us   INTEGER NOT NULL,
    last_auth_us  INTEGER
);
CREATE TABLE webhook_events (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id   INTEGER NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    event        TEXT    NOT NULL,                -- JSON; the request's body is built from it at the attempt
    created_us   INTEGER NOT NULL,
    due_us       INTEGER NOT NULL,                -- earliest time of the next attempt
    num_attempts INTEGER NOT NULL DEFAULT 0       -- number of completed attempts
);
CREATE TABLE webhook_task_logs (
    task_id    TEXT    NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    trigger_id INTEGER NOT NULL REFERENCES webhook_triggers (id) ON DELETE CASCADE,
    PRIMARY KEY (task_id, trigger_id)
) WITHOUT ROWID;
CREATE TABLE webhook_triggers (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id INTEGER NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    type       TEXT    NOT NULL,                  -- EXPERIMENT_STATE_CHANGE TASK_LOG CUSTOM
    condition  TEXT    NOT NULL                   -- a state, or a pattern, or empty
);
CREATE TABLE webhooks (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    name          TEXT    NOT NULL,
    url           TEXT    NOT NULL,
    type          TEXT    NOT NULL,               -- DEFAULT SLACK
    mode          TEXT    NOT NULL,               -- WORKSPACE SPECIFIC
    workspace_id  INTEGER REFERENCES workspaces (id) ON DELETE CASCADE,   -- NULL: all of them
    created_us    INTEGER NOT NULL,
    num_delivered INTEGER NOT NULL DEFAULT 0,     -- number of events that the receiver accepted
    num_failed    INTEGER NOT NULL DEFAULT 0,     -- number of events dropped after their last attempt
    num_dropped   INTEGER NOT NULL DEFAULT 0,     -- number of events not queued because the queue was full
    last_us       INTEGER,                        -- time of the last attempt; NULL: none
    last_result   TEXT                            -- result of the last attempt
);
CREATE TABLE work (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    kind          TEXT    NOT NULL,               -- see store/background_jobs.py
    experiment_id INTEGER NOT NULL,               -- 0 for projects and workspaces
    payload       TEXT    NOT NULL DEFAULT '{}',
    created_us    INTEGER NOT NULL
);
CREATE TABLE workspaces (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    name               TEXT    NOT NULL UNIQUE COLLATE NOCASE,
    owner_id           INTEGER NOT NULL,
    created_us         INTEGER NOT NULL,
    is_immutable       INTEGER NOT NULL DEFAULT 0,
    is_archived        INTEGER NOT NULL DEFAULT 0,
    state              TEXT    NOT NULL DEFAULT 'UNSPECIFIED',   -- or DELETING, DELETE_FAILED
    error              TEXT    NOT NULL DEFAULT '',  -- why it could not be deleted
    checkpoint_storage TEXT,                      -- JSON, default of its experiments; NULL: the master's
    agent_user_group   TEXT                       -- JSON, stored and shown only
);
INSERT INTO "workspaces" VALUES(1,'Uncategorized',1,0,1,0,'UNSPECIFIED','',NULL,NULL);
CREATE INDEX tokens_by_allocation ON tokens (allocation_id);
CREATE INDEX experiments_by_state ON experiments (state);
CREATE INDEX experiments_by_project ON experiments (project_id, archived, owner_id);
CREATE UNIQUE INDEX experiments_by_external_id ON experiments (external_id) WHERE external_id IS NOT NULL;
CREATE INDEX trials_by_experiment ON trials (experiment_id);
CREATE INDEX trials_by_metric ON trials (experiment_id, searcher_metric_value);
CREATE INDEX trials_by_state ON trials (state, experiment_id);
CREATE UNIQUE INDEX trials_by_external_id ON trials (experiment_id, external_id) WHERE external_id IS NOT NULL;
CREATE TRIGGER trials_counted AFTER INSERT ON trials BEGIN
    UPDATE experiments SET num_trials = num_trials + 1 WHERE id = NEW.experiment_id;
END;
CREATE TRIGGER trial_checkpoints_counted AFTER UPDATE OF checkpoint_count, checkpoint_size ON trials BEGIN
    UPDATE experiments SET checkpoint_count = checkpoint_count + NEW.checkpoint_count - OLD.checkpoint_count,
        checkpoint_size = checkpoint_size + NEW.checkpoint_size - OLD.checkpoint_size WHERE id = NEW.experiment_id;
END;
CREATE INDEX tasks_by_trial ON tasks (trial_id);
CREATE INDEX allocations_by_state ON allocations (state);
CREATE INDEX allocations_by_trial ON allocations (trial_id, run_id);
CREATE INDEX allocations_by_task ON allocations (task_id);
CREATE UNIQUE INDEX metrics_by_trial ON metrics (trial_id, group_name, steps, run_id) WHERE steps >= 0;
CREATE INDEX profiling_by_trial ON metrics (trial_id, group_name, end_us) WHERE steps < 0;
CREATE INDEX checkpoints_by_trial ON checkpoints (trial_id, steps);
CREATE INDEX checkpoints_by_experiment ON checkpoints (experiment_id);
CREATE INDEX logs_by_trial ON logs (trial_id, id);
CREATE INDEX logs_by_task ON logs (task_id, id) WHERE trial_id IS NULL;
CREATE UNIQUE INDEX log_sizes_by_trial ON log_sizes (trial_id) WHERE trial_id IS NOT NULL;
CREATE UNIQUE INDEX log_sizes_by_task ON log_sizes (task_id) WHERE trial_id IS NULL;
CREATE INDEX model_versions_by_checkpoint ON model_versions (checkpoint_uuid);
CREATE INDEX commands_by_state ON commands (state);
CREATE INDEX commands_by_parent ON commands (parent_id);
CREATE INDEX access_tokens_by_user ON access_tokens (user_id);
CREATE INDEX webhook_triggers_by_type ON webhook_triggers (type, condition);
CREATE INDEX webhook_triggers_by_webhook ON webhook_triggers (webhook_id);
CREATE INDEX webhook_task_logs_by_trigger ON webhook_task_logs (trigger_id);
CREATE INDEX webhook_events_by_webhook ON webhook_events (webhook_id, due_us);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('workspaces',1);
INSERT INTO "sqlite_sequence" VALUES('projects',1);
COMMIT;
