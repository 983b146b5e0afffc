-- From schema version 5 to 6: a row for each name of a metric, which was a part of one JSON object of its trial; quotas of logs.

CREATE TABLE metric_summaries (
    trial_id   INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    group_name TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    summary    TEXT    NOT NULL,                  -- JSON {count,sum,mean,min,max,last,type}
    PRIMARY KEY (trial_id, group_name, name)
) WITHOUT ROWID;
INSERT OR IGNORE INTO metric_summaries (trial_id, group_name, name, summary)
    SELECT t.id, CASE g.key WHEN 'avg_metrics' THEN 'training' WHEN 'validation_metrics' THEN 'validation' ELSE g.key END,
        n.key, n.value
    FROM trials t, json_each(t.summary_metrics) g, json_each(g.value) n;

CREATE TABLE metric_groups (
    trial_id   INTEGER NOT NULL REFERENCES trials (id) ON DELETE CASCADE,
    group_name TEXT    NOT NULL,                  -- empty: all groups that are one too many
    num_names  INTEGER NOT NULL,
    is_told    INTEGER NOT NULL DEFAULT 0,        -- the trial's log says that others are left out
    PRIMARY KEY (trial_id, group_name)
) WITHOUT ROWID;
INSERT INTO metric_groups (trial_id, group_name, num_names)
    SELECT trial_id, group_name, COUNT(*) FROM metric_summaries GROUP BY trial_id, group_name;

ALTER TABLE trials DROP COLUMN summary_metrics;

-- How large a log is, and what of it is left out since it is larger than it may be.
CREATE TABLE log_sizes (
    id             INTEGER PRIMARY KEY,
    task_id        TEXT    NOT NULL,              -- of a trial, that which printed first
    trial_id       INTEGER,                       -- NULL: of a task without a trial
    num_bytes      INTEGER NOT NULL,              -- of the lines of its processes that are kept, with their rows
    is_head_full   INTEGER NOT NULL DEFAULT 0,    -- whether the beginning is complete, which is half of the quota
    tail_id        INTEGER NOT NULL,              -- logs.id behind which the newest lines are
    marker_id      INTEGER,                       -- logs.id of the line that tells of those left out; NULL: none is
    num_left_out   INTEGER NOT NULL DEFAULT 0,    -- lines
    bytes_left_out INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX log_sizes_by_trial ON log_sizes (trial_id) WHERE trial_id IS NOT NULL;
CREATE UNIQUE INDEX log_sizes_by_task ON log_sizes (task_id) WHERE trial_id IS NULL;
ALTER TABLE allocations ADD COLUMN log_lines INTEGER NOT NULL DEFAULT 0;
