"""Train, take the best checkpoint, register it as a version of a model, and fetch it: with Determined's SDK alone.

Runs unchanged against the embedded master and against a Determined cluster, whichever `DET_MASTER` names:

    python examples/register_best.py experiment_configs/digits.yaml model_defs/digits digits best-digits
"""

import argparse
import pathlib

from determined.experimental import client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="an experiment config, YAML")
    parser.add_argument("model_dir", help="its model definition")
    parser.add_argument("model", help="name of the registered model, made if there is none")
    parser.add_argument("out", help="directory for the checkpoint's files")
    args = parser.parse_args()

    experiment = client.create_experiment(args.config, args.model_dir)
    print(f"experiment {experiment.id} runs")
    state = experiment.wait(interval=1)
    if state is not client.ExperimentState.COMPLETED:
        raise SystemExit(
            f"experiment {experiment.id} ended as {state.name}; see det experiment logs {experiment.id}"
        )

    [best] = experiment.list_checkpoints(max_results=1)  # by the searcher's metric, the best first
    known = [one for one in client.list_models(name=args.model) if one.name == args.model]
    model = known[0] if known else client.create_model(args.model, f"The best of {args.config}.")
    version = model.register_version(best.uuid)
    version.set_notes(f"experiment {experiment.id}, {best.training.validation_metrics['avgMetrics']}")
    print(f"checkpoint {best.uuid} is version {version.model_version} of {model.name}: {version.notes}")

    path = pathlib.Path(client.get_model(args.model).get_version().checkpoint.download(args.out))
    for file in sorted(path.rglob("*")):
        if file.is_file():
            print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
