-- From schema version 4 to 5: access tokens and webhooks; policies that exclude a machine, where allocations were, what tasks
-- were submitted with, and work that is done.

-- Tokens that a person asks for, for scripts. Rows stay after their end, so that lists can show them.
CREATE TABLE access_tokens (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    token_hash  TEXT    NOT NULL UNIQUE,          -- SHA-256, as in tokens
    user_id     INTEGER NOT NULL REFERENCES users (id),
    description TEXT    NOT NULL DEFAULT '',
    created_us  INTEGER NOT NULL,
    expires_us  INTEGER,                          -- NULL: never
    revoked_us  INTEGER                           -- NULL: it has not been revoked
);
CREATE INDEX access_tokens_by_user ON access_tokens (user_id);

CREATE TABLE webhooks (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    name          TEXT    NOT NULL,
    url           TEXT    NOT NULL,
    type          TEXT    NOT NULL,               -- DEFAULT SLACK
    mode          TEXT    NOT NULL,               -- WORKSPACE SPECIFIC
    workspace_id  INTEGER REFERENCES workspaces (id) ON DELETE CASCADE,   -- NULL: all of them
    created_us    INTEGER NOT NULL,
    num_delivered INTEGER NOT NULL DEFAULT 0,     -- events that its address has taken
    num_failed    INTEGER NOT NULL DEFAULT 0,     -- events given up
    num_dropped   INTEGER NOT NULL DEFAULT 0,     -- events not queued, as too many waited
    last_us       INTEGER,                        -- when it was tried last, NULL: never
    last_result   TEXT                            -- what came of that
);
CREATE UNIQUE INDEX webhooks_by_name ON webhooks (COALESCE(workspace_id, 0), name);

CREATE TABLE webhook_triggers (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id INTEGER NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    type       TEXT    NOT NULL,                  -- EXPERIMENT_STATE_CHANGE TASK_LOG CUSTOM
    condition  TEXT    NOT NULL                   -- a state, or a pattern, or empty
);
CREATE INDEX webhook_triggers_by_type ON webhook_triggers (type, condition);
CREATE INDEX webhook_triggers_by_webhook ON webhook_triggers (webhook_id);

-- A pattern is told of once for each task.
CREATE TABLE webhook_task_logs (
    task_id    TEXT    NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    trigger_id INTEGER NOT NULL REFERENCES webhook_triggers (id) ON DELETE CASCADE,
    PRIMARY KEY (task_id, trigger_id)
) WITHOUT ROWID;
CREATE INDEX webhook_task_logs_by_trigger ON webhook_task_logs (trigger_id);

-- What is to be sent. Delivered events are deleted; of those given up the newest are kept.
CREATE TABLE webhook_events (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id   INTEGER NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    event        TEXT    NOT NULL,                -- JSON, of which the body is made when it is sent
    created_us   INTEGER NOT NULL,
    due_us       INTEGER NOT NULL,                -- not to be tried before
    num_attempts INTEGER NOT NULL DEFAULT 0,      -- that have ended
    given_up_us  INTEGER                          -- NULL: it waits
);
CREATE INDEX webhook_events_by_webhook ON webhook_events (webhook_id, given_up_us, due_us);

ALTER TABLE trials ADD COLUMN is_node_excluded INTEGER NOT NULL DEFAULT 0;

ALTER TABLE allocations ADD COLUMN workspace_name TEXT;
-- Where they are now is all that is known of the older ones.
UPDATE allocations SET workspace_name = COALESCE(
    (SELECT w.name FROM experiments e JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id
     WHERE e.id = allocations.experiment_id),
    (SELECT w.name FROM commands c JOIN workspaces w ON w.id = c.workspace_id WHERE c.task_id = allocations.task_id)
);

ALTER TABLE commands ADD COLUMN original_config TEXT;

ALTER TABLE work ADD COLUMN ended_us INTEGER;
