#!/bin/bash
# nano from its trained autoencoder to weights, evidence and the quality table, on a machine that lends a GPU in
# pieces of time. The training runs on in the background; every call waits for it a while.
#   nano_gpu.sh start 400     try the recipe at a fiftieth of its length, then train; wait up to 400 s
#   nano_gpu.sh wait 500      wait on; when it is over, its files are in $OUT
#   nano_gpu.sh look          held-out prompts at both sizes read back, methods at equal totals, a calibrated book,
#                             and the GPU tests of books and metrics: all at once, nothing of it is timed
# PACKAGES: a folder with diffusers, if the machine has none. JALI_WEIGHTS: a folder with LPIPS weights. STATE survives
# between calls.
set -u
STATE=${STATE:-/opt/nano}; CODE=${CODE:-/opt/nano-src}; OUT=${OUT:?a folder for what is made}
export PYTHONPATH=${PACKAGES:-}:src PYTHONUNBUFFERED=1
quiet() { grep -v "should be kept\|Warning\|Loading\|Writing\|return node"; }

case $1 in
start)
  mkdir -p "$STATE" && rm -rf "$CODE" && cp -r src "$CODE" && cp -r training "$CODE"
  cat > "$STATE/run.sh" <<END
    export PYTHONPATH=${PACKAGES:-}:$CODE
    train() { python3 -m training.train --autoencoder "$CODE/jali/nano/weights/vae" "\$@"; }
    date +%T; train --state "$STATE-try" --pace 0.02 --export "$STATE-try/pipe" &&
      python3 -m training.evidence --weights "$STATE-try/pipe" --prompts 4 --output "$STATE-try/evidence.json" \
        --sheet "$STATE-try/sheet.png" && date +%T && train --state "$STATE" --export "$STATE/pipe"
    echo "over with \$?"; date +%T; touch "$STATE/over"
END
  rm -f "$STATE/over"
  setsid nohup bash "$STATE/run.sh" > "$STATE/log" 2>&1 &
  ;&
wait)
  for _ in $(seq "$2"); do [ -f "$STATE/over" ] && break; sleep 1; done
  quiet < "$STATE/log" | tail -60; nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
  if [ -f "$STATE/losses.json" ]; then
    cp "$STATE/losses.json" "$OUT/"
    i=0; for shard in "$STATE"/pipe/transformer/*.safetensors; do i=$((i + 1)); cp "$shard" "$OUT/transformer-$i.safetensors"; done
    cp "$STATE"/pipe/text_encoder/*.safetensors "$OUT/text.safetensors"
    (cd "$STATE/pipe" && tar czf "$OUT/rest.tgz" $(find . -name '*.json'))
  fi ;;
look)
  made=$STATE/look; mkdir -p "$made"
  for size in "128 128 33" "192 320 37"; do
    read -r height width frames <<< "$size"
    python3 -m training.evidence --weights "$STATE/pipe" --height "$height" --width "$width" --frames "$frames" \
      --output "$made/evidence-${height}x$width.json" --sheet "$OUT/sheet-${height}x$width.png" > "$made/evidence-$height.log" 2>&1 &
  done
  python3 -m benchmarks.nano_quality --path "$STATE/pipe" --seconds "${SECONDS_OF_QUALITY:-500}" \
    --output "$made/quality-totals.json" > "$made/quality.log" 2>&1 &
  OUT=$made python3 benchmarks/dev/book_quality.py --path "$STATE/pipe" > "$made/book.log" 2>&1 &
  python3 -m pytest -q -m gpu -p no:cacheprovider tests/maskbook/test_book_gpu.py tests/quality/test_metric.py > "$made/tests.log" 2>&1 &
  wait
  for log in "$made"/*.log; do echo "== $log"; quiet < "$log" | tail -12; done
  (cd "$made" && tar czf "$OUT/look.tgz" ./*.json ./*.log) ;;
esac
