#!/usr/bin/env bash
# The README's two commands in a minimal Debian, by hand: needs root, debootstrap and 5 GB of disk.
#
#   tests/minimal_debian.sh [SUITE [FOLDER]]
#
# SUITE is trixie (Debian 13, Python 3.13) by default. FOLDER keeps the system for another try.
set -euo pipefail
suite=${1:-trixie}
root=${2:-$(mktemp -d)}/$suite
checkout=$(cd "$(dirname "$0")/.." && pwd)

packages=python3,python3-venv,make,git,ca-certificates
[ -d "$root" ] || debootstrap --variant=minbase --include=$packages "$suite" "$root"
# The host's certificates, for networks that have some of their own.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cp /etc/resolv.conf "$root/etc/"
rm -rf "$root/root/sebulba"
git clone -q "$checkout" "$root/root/sebulba"

mount --bind /proc "$root/proc"
mount --bind /dev "$root/dev"
mount --bind /dev/pts "$root/dev/pts"
trap 'umount "$root/proc" "$root/dev/pts" "$root/dev"' EXIT
for goal in train test; do
  began=$SECONDS
  status=0
  # Nothing of the host's environment, but where packages come from.
  env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
    $(env | grep -E '^PIP_(INDEX_URL|CERT|TIMEOUT|DEFAULT_TIMEOUT)=' || true) \
    "$(command -v chroot)" "$root" make -C /root/sebulba "$goal" </dev/null || status=$?
  echo "make $goal: exit code $status after $((SECONDS - began)) s"
done
