-- From schema version 5 to 6: a row for each name of a metric, which was a part of one JSON object of its trial.

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
