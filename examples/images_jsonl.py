"""Describe all images of a folder, by a batch file that can be resumed.

    python images_jsonl.py MODEL FOLDER [OUTPUT]

It writes a row for each image and runs `shmllm generate`, which opens an image when the engine has
room for it. The same command goes on after an interruption; rows that have a record are not
repeated. An image that cannot be read is an error in its record.
"""

import json
import subprocess
import sys
from pathlib import Path

KINDS = {".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}

if len(sys.argv) < 3:
    sys.exit("usage: python images_jsonl.py MODEL FOLDER [OUTPUT]")
model, folder = sys.argv[1], Path(sys.argv[2])
target = Path(sys.argv[3] if len(sys.argv) > 3 else "descriptions.jsonl")
source = target.with_name(f"{target.stem}.rows.jsonl")

paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in KINDS)
names = [str(path.relative_to(folder)) for path in paths]
prompt = "Describe this image in one sentence."
rows = [{"id": name, "prompt": prompt, "images": [name]} for name in names]
source.write_text("".join(json.dumps(row) + "\n" for row in rows))

command = [sys.executable, "-m", "shmllm", "generate", "-m", model, "-i", str(source)]
command += ["-o", str(target), "--resume", "--allowed-local-media-path", str(folder)]
code = subprocess.run([*command, "--max-tokens", "32"], check=False).returncode

for line in target.read_text().splitlines() if target.exists() else ():
    record = json.loads(line)
    print(f"{record['id']}: {record.get('text', record.get('error'))}")
sys.exit(code)
