#!/usr/bin/env -S bash -ex
# Scaling laws from the learning rate to the report on two cores: 24 small runs and one that they
# forecast, as docs/scaling-example.md shows. It demonstrates the workflow: 20 runs at four small
# budgets say nothing about large models. Repeated, it continues where it ended.
OUT=${SCALING:-runs/scaling-demo}
EXPERIMENT=configs/experiments/scaling-demo.yaml

test -f $OUT/text.jsonl || python -m benchmarks.texts $OUT/text.jsonl
test -f $OUT/data/build.json || data-pipeline build configs/data/bytes.yaml \
    --input $OUT/text.jsonl --output $OUT/data validation_fraction=0.04 shard_bytes=524288

# The best learning rate of the narrowest model, which holds at every width.
pretrain scale plan $EXPERIMENT --rates 1.2e-2 2.4e-2 4.8e-2 9.6e-2 --name scaling-demo-tune \
    --output $OUT/tune.yaml model.d_model=16 model.num_heads=4 optim.steps=600
launcher sweep submit $OUT/tune.yaml --local -j 2 --runs-dir $OUT/tune
pretrain scale collect $OUT/tune.yaml --runs-dir $OUT/tune
pretrain scale report $OUT/tune/runs.csv

# Five sizes at each of four budgets.
pretrain scale plan $EXPERIMENT --budgets 1e10 2e10 4e10 8e10 --sizes 5 --spread 1.7 \
    --tokens-per-parameter 25 --no-checks --tuned $OUT/tune/runs.csv --keep-layers \
    --name scaling-demo --output $OUT/sweep.yaml
launcher sweep submit $OUT/sweep.yaml --local -j 2 --runs-dir $OUT
pretrain scale collect $OUT/sweep.yaml --runs-dir $OUT

# The laws; the forecast of a run three times as large, written before that run; how it came out.
pretrain scale fit $OUT/runs.csv
test -f $OUT/card.yaml || pretrain scale forecast $OUT/runs.csv --flops 2.4e11 --force \
    -o $OUT/card.yaml
test -f $OUT/best.yaml || pretrain scale fit $OUT/runs.csv --flops 2.4e11 --force \
    --experiment $EXPERIMENT --tuned $OUT/tune/runs.csv --keep-layers --write $OUT/best.yaml
launcher local $OUT/best.yaml --run-dir $OUT/best --forecast $OUT/card.yaml
pretrain scale grade $OUT/card.yaml $OUT/best || test $? = 1  # 1: outside the interval

pretrain scale report $OUT/runs.csv --output $OUT/report \
    --title "Scaling demo: the workflow on tiny models, no law of large ones"
# Open runs/scaling-demo/report/report.html.
