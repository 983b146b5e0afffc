-- From schema version 7 to 8: what Determined's web interface keeps, and a runner's state as the runner calls it.

-- What a user has set in Determined's web interface.
CREATE TABLE user_settings (
    user_id      INTEGER NOT NULL REFERENCES users (id),
    storage_path TEXT    NOT NULL,                -- the page or table that it is of; may be empty
    key          TEXT    NOT NULL,
    value        TEXT    NOT NULL,                -- as sent, JSON usually
    PRIMARY KEY (user_id, storage_path, key)
) WITHOUT ROWID;

-- When a user last looked at a project there.
CREATE TABLE project_views (
    user_id    INTEGER NOT NULL REFERENCES users (id),
    project_id INTEGER NOT NULL REFERENCES projects (id) ON DELETE CASCADE,
    viewed_us  INTEGER NOT NULL,
    PRIMARY KEY (user_id, project_id)
) WITHOUT ROWID;

-- What an allocation has said of its accelerators, a row for each of its containers.
CREATE TABLE allocation_accelerators (
    allocation_id TEXT NOT NULL REFERENCES allocations (id) ON DELETE CASCADE,
    container_id  TEXT NOT NULL,
    node_name     TEXT NOT NULL,
    type          TEXT NOT NULL,                  -- what the harness calls it, cuda for example
    uuids         TEXT NOT NULL,                  -- JSON list
    PRIMARY KEY (allocation_id, container_id)
) WITHOUT ROWID;

UPDATE trials SET runner_state = lower(runner_state) WHERE runner_state != 'UNSPECIFIED';
