#!/usr/bin/env bash
# What `make gpu` runs: dstrial doctor, the tests marked gpu, and dstrial doctor --train with the minutes that are left.
#
# usage: tools/prove_on_gpu.sh PYTHON OUT MINUTES
#
# Needs no network and installs nothing: PYTHON has torch, DeepSpeed and Determined beside it or on PYTHONPATH, and dstrial is
# this checkout. OUT gets log.txt, doctor.json, tests.xml, result.json and a log of each step, as soon as they are known. Exits 0
# if everything worked on an accelerator; DS_ACCELERATOR=cpu says that none is meant.
set -uo pipefail
python=$1 out=$2 minutes=$3
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
command -v "$python" >/dev/null || { echo "PYTHON is $python; expected an interpreter. Set PYTHON=python3." >&2; exit 2; }
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

# Tests end by then, so that there is time left for the training of the doctor.
test_seconds=$("$python" -c "print(int(float('$minutes') * 60 * 0.75))") || exit 2
required=(--require-gpus)
[ "${DS_ACCELERATOR:-}" = cpu ] && required=()

prove() {
    local looked tested trained left files
    SECONDS=0
    "$python" -m dstrial.cli doctor "${required[@]}" --output "$out"
    looked=$?
    # Only files that have such tests: collecting all others would take longer than running these.
    mapfile -t files < <(grep -rl 'pytest\.mark\.gpu' tests --include='test_*.py' | sort)
    timeout --signal=INT --kill-after=20 "$test_seconds" \
        "$python" -m pytest -m gpu -v -p no:cacheprovider --junitxml="$out/tests.xml" "${files[@]}"
    tested=$?
    left=$("$python" -c "print(round(max(0.5, float('$minutes') - $SECONDS / 60), 1))")
    "$python" -m dstrial.cli doctor --train --minutes "$left" --output "$out"
    trained=$?
    echo
    echo "after $SECONDS s: doctor $(said $looked), tests marked gpu $(said $tested), doctor --train $(said $trained); all in $out"
    [ "$looked$tested$trained" = 000 ]
}

said() {
    case $1 in
        0) echo ok ;;
        124 | 137) echo "ended after its time" ;;
        *) echo "failed (status $1)" ;;
    esac
}

prove 2>&1 | tee "$out/log.txt"
exit "${PIPESTATUS[0]}"
