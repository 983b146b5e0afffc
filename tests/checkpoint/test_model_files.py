import pathlib

from dstrial.checkpoint.model_files import find_model_files


def test_the_first_directory_that_has_a_file_gives_it(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, text in ((first, "1"), (second, "2")):
        directory.mkdir()
        (directory / "tokenizer.json").write_text(text)
        (directory / "model_def.py").write_text(text)
    (second / "config.json").write_text('{"architectures": ["Wide"]}')
    found = find_model_files([tmp_path / "nowhere", first, second])
    assert found == [first / "tokenizer.json", second / "config.json"]


def test_a_config_of_something_else_is_left_out(tmp_path: pathlib.Path) -> None:
    for text in ('{"train_batch_size": 8}', "[1]", "no json", '"text"'):
        (tmp_path / "config.json").write_text(text)
        assert find_model_files([tmp_path]) == []
