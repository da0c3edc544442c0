#!/usr/bin/env python3
"""Random programs on a real card: natively, then in turns beside a neighbour, four at once. storm.py [--how native|turns] [--seeds N] [--first N] [--seconds N]. Needs `dist/` (cargo dist-local) and no toolkit.
Rows go to $OUT/rows.jsonl as they come, what was said to $OUT/native.txt and $OUT/turns.txt. The last line counts seeds, hand-overs and findings; exit code 1 if there was a finding."""
import argparse, re
from harness import *

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["native", "turns"], action="append", help="one of both alone, in all of the time")
parser.add_argument("--seeds", type=int, default=512)
parser.add_argument("--first", type=int, default=1)
parser.add_argument("--seconds", type=int, default=470)
ARGUMENTS = parser.parse_args()
# A context costs a card more than a whole program: 32 programs share one, and the last of them makes others beside it.
COMMON = ["--real", "--library", DIST / "lib/nvshare/libnvshare.so", "--scheduler", DIST / "bin/nvshare-scheduler", "--ctl", DIST / "bin/nvshare-ctl",
          "--jobs", "4", "--batch", "32", "--steps", "60", "--capacity", "1GiB", "--patience", "60", "--keep-going", "--seeds", str(ARGUMENTS.seeds), "--first", str(ARGUMENTS.first)]
LAST = re.compile(r"storm: (\d+) seeds from \d+ in (\d+) s, median (\d+) ms natively and (\d+) ms in turns, (\d+) hand-overs, (\d+) findings natively, (\d+) findings")


def storm(how, *arguments, limit):
    begin = time.time()
    environment = dict(os.environ, CUDA_CACHE_PATH=tempfile.mkdtemp())
    with open(OUT / f"{how}.txt", "w") as out:
        process = subprocess.Popen([DIST / "libexec/nvshare-storm", "storm", *COMMON, *arguments], stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    said = (OUT / f"{how}.txt").read_text(errors="replace")
    counted = LAST.findall(said)
    seeds, _, native_ms, turns_ms, hand_overs, native, found = map(int, counted[-1]) if counted else (0, 0, 0, 0, 0, 0, 1)
    kinds = sorted(re.findall(r"storm: seed (\d+), (?:natively|under nvshare): (.*)", said), key=lambda k: int(k[0]))
    row(scenario="storm", how=how, rc=process.returncode, seeds=seeds, took_s=round(time.time() - begin, 1), median_ms=max(native_ms, turns_ms), hand_overs=hand_overs, findings=native + found, which="; ".join(f"{s}: {k}" for s, k in kinds)[:600])
    for finding in re.findall(r"(?ms)^storm: seed \d+, (?:natively|under nvshare): .*?(?=^storm: seed \d+, |^storm: composed)", said):
        print(finding[:3000], flush=True)
    return seeds, hand_overs, native + found


if __name__ == "__main__":
    print(card(), flush=True)
    hows, sums = ARGUMENTS.how or ["native", "turns"], []
    for how in hows:
        limit = ARGUMENTS.seconds if len(hows) == 1 else ARGUMENTS.seconds * (3 if how == "native" else 7) // 10
        # What is begun is run to its end: a process with its programs takes up to a minute.
        sums.append(storm(how, "--native" if how == "native" else "--skip-native", "--seconds", str(limit - 60), limit=limit))
    print(card())
    each = " and ".join(f"{seeds} seeds {'natively' if how == 'native' else 'in turns'}" for how, (seeds, _, _) in zip(hows, sums))
    print(f"storm: {each}, {sum(s[1] for s in sums)} hand-overs, {sum(s[2] for s in sums)} findings")
    sys.exit(any(found for _, _, found in sums))
