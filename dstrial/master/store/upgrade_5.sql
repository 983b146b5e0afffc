-- From schema version 4 to 5: policies that exclude a machine, where allocations were, what tasks were submitted with, and
-- work that is done.

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
