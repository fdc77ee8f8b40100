#!/bin/bash
# nano from its trained autoencoder to weights, evidence and the quality table, on a machine that lends a GPU in
# pieces of time. The training runs on in the background; every call waits for it a while.
#   nano_gpu.sh start 400     start training, wait up to 400 s
#   nano_gpu.sh wait 500      wait on; when it is over, its files are in $OUT
#   nano_gpu.sh judge         held-out prompts at both sizes, read back
#   nano_gpu.sh quality       every method at equal cost (JALI_WEIGHTS: folder with LPIPS weights)
# PACKAGES: a folder with diffusers, if the machine has none. STATE survives between calls.
set -u
STATE=${STATE:-/opt/nano}; CODE=${CODE:-/opt/nano-src}; OUT=${OUT:?a folder for what is made}
export PYTHONPATH=${PACKAGES:-}:src PYTHONUNBUFFERED=1
quiet() { grep -v "should be kept\|Warning\|Loading\|Writing\|return node"; }

case $1 in
start)
  mkdir -p "$STATE" && rm -rf "$CODE" && cp -r src "$CODE"
  PYTHONPATH=${PACKAGES:-}:$CODE setsid nohup python3 -m jali.nano.train --state "$STATE" \
    --autoencoder "$CODE/jali/nano/weights/vae" --export "$STATE/pipe" > "$STATE/log" 2>&1 &
  ;&
wait)
  for _ in $(seq "$2"); do [ -f "$STATE/losses.json" ] && break; sleep 1; done
  quiet < "$STATE/log" | tail -40
  if [ -f "$STATE/losses.json" ]; then
    cp "$STATE/losses.json" "$OUT/"
    i=0; for shard in "$STATE"/pipe/transformer/*.safetensors; do i=$((i + 1)); cp "$shard" "$OUT/transformer-$i.safetensors"; done
    cp "$STATE"/pipe/text_encoder/*.safetensors "$OUT/text.safetensors"
    (cd "$STATE/pipe" && tar czf "$OUT/rest.tgz" $(find . -name '*.json'))
  fi ;;
judge)
  for size in "128 128 33" "192 320 37"; do
    set -- $size
    python3 -m jali.nano.evidence --weights "$STATE/pipe" --height "$1" --width "$2" --frames "$3" \
      --output "$OUT/evidence-$1x$2.json" --sheet "$OUT/sheet-$1x$2.png" 2>&1 | quiet
  done ;;
quality)
  python3 benchmarks/nano_quality.py --path "$STATE/pipe" --output "$OUT/quality-nano.json" 2>&1 | quiet ;;
esac
