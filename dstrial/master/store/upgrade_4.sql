-- From schema version 3 to 4: which files a checkpoint consists of, by the SHA-256 of its manifest.

ALTER TABLE checkpoints ADD COLUMN manifest_sha256 TEXT;
