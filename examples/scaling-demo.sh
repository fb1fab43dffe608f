#!/usr/bin/env -S bash -ex
# Scaling laws from the learning rate to the report on two cores: 20 small runs, one held out, as
# docs/scaling-example.md shows. It demonstrates the workflow: 15 runs at three small budgets say
# nothing about large models. Repeated, it continues where it ended.
OUT=${SCALING:-runs/scaling-demo}
EXPERIMENT=configs/experiments/scaling-demo.yaml

test -f $OUT/text.jsonl || python -m benchmarks.texts $OUT/text.jsonl
test -f $OUT/data/build.json || data-pipeline build configs/data/bytes.yaml \
    --input $OUT/text.jsonl --output $OUT/data validation_fraction=0.04 shard_bytes=524288

# The best learning rate of the narrowest model, which holds at every width.
pretrain scale plan $EXPERIMENT --rates 6e-3 1.2e-2 2.4e-2 4.8e-2 --name scaling-demo-tune \
    --output $OUT/tune.yaml model.d_model=16 model.num_heads=4 optim.steps=1500
launcher sweep submit $OUT/tune.yaml --local -j 2 --runs-dir $OUT/tune
pretrain scale collect $OUT/tune.yaml --runs-dir $OUT/tune
pretrain scale report $OUT/tune/runs.csv

# Five sizes at each of three budgets, and one larger run that no law is fitted to.
pretrain scale plan $EXPERIMENT --budgets 8e10 2.4e11 7.2e11 --sizes 5 --spread 1.7 \
    --tokens-per-parameter 45 --no-checks --holdout-budgets 2.2e12 \
    --tuned $OUT/tune/runs.csv --keep-layers --name scaling-demo --output $OUT/sweep.yaml
launcher sweep submit $OUT/sweep.yaml --local -j 2 --runs-dir $OUT
pretrain scale collect $OUT/sweep.yaml --runs-dir $OUT

# The laws, the best run of a larger budget as an experiment file, and a page of it all.
rm -f $OUT/best.yaml
pretrain scale fit $OUT/runs.csv
pretrain scale fit $OUT/runs.csv --flops 3.6e12 --force --experiment $EXPERIMENT \
    --tuned $OUT/tune/runs.csv --keep-layers --write $OUT/best.yaml
pretrain scale report $OUT/runs.csv --output $OUT/report \
    --title "Scaling demo: the workflow on tiny models, no law of large ones"
# Open runs/scaling-demo/report/report.html.
