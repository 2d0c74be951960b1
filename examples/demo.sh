#!/usr/bin/env bash
# The main job, start to end: search a plan for a perceptron on 2 GPUs, print it, emit its program, and check the program
# on 2 CPU ranks against PyTorch. Then train on real data: digits on 1, 2 and 4 ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
mkdir -p out

echo "--- Unity's Figure 2: the two plans of the paper"
unity-opt examples/fig2_data_parallel.pcg --stats -o out/fig2_data_parallel.pcg 2>&1 | sed -n 1,3p
unity-opt examples/fig2_joint.pcg --stats -o out/fig2_joint.pcg 2>&1 | sed -n 1,3p

echo
echo "--- What the search finds for the same model with its loss"
unity-opt examples/mnist_mlp.pcg --search --machine=2gpu --stats -o out/mnist_plan.pcg
cat out/mnist_plan.pcg

echo "--- Its program, checked on 2 ranks against plain PyTorch: out/mnist.py"
unity-opt out/mnist_plan.pcg -t triton -o out/mnist.py
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 out/mnist.py --backend gloo --check

echo
echo "--- Digits, trained on 1, 2 and 4 ranks"
python examples/digits.py --out out/digits
