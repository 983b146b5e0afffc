-- From schema version 6 to 7: machines besides the master's own, and what is known of an allocation on each of them.

CREATE TABLE nodes (
    id   INTEGER PRIMARY KEY AUTOINCREMENT,       -- from 1: 0 is the master's own machine; its slots are id * 1024 and up
    name TEXT    NOT NULL UNIQUE                  -- as ssh takes it
);

-- The master's own machine has no rows: there the allocation's own columns say all.
CREATE TABLE allocation_nodes (
    allocation_id TEXT    NOT NULL REFERENCES allocations (id) ON DELETE CASCADE,
    node_id       INTEGER NOT NULL,
    rank          INTEGER NOT NULL,               -- of the node, from 0
    pid           INTEGER,                        -- of the supervisor there
    start_time    TEXT,                           -- of that process, as its /proc tells
    log_offset    INTEGER NOT NULL DEFAULT 0,     -- bytes of its log that are in logs
    log_lines     INTEGER NOT NULL DEFAULT 0,     -- lines of its log up to log_offset
    exit_code     INTEGER,                        -- as a shell sees it
    signal        INTEGER,                        -- that ended it
    cause         TEXT,                           -- exited lost unreachable preempted refused
    PRIMARY KEY (allocation_id, node_id)
) WITHOUT ROWID;

-- Nodes that a log policy (exclude_node) keeps a trial from, where there are several.
CREATE TABLE excluded_nodes (
    trial_id INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    node_id  INTEGER NOT NULL,
    PRIMARY KEY (trial_id, node_id)
) WITHOUT ROWID;
INSERT INTO excluded_nodes (trial_id, node_id) SELECT id, 0 FROM trials WHERE is_node_excluded > 0;
