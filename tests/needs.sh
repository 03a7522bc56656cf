#!/usr/bin/env bash
# Names the Debian packages that `make test-all` needs and that are not here, in one line; with
# --install, root installs them, and what is named after it. What needs one of them is skipped
# without, and fails if CI=true.
set -euo pipefail

missing=("${@:2}")
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need ip iproute2
# Shells whose completion is tested.
need zsh zsh
need fish fish
# Masters elect through etcd; transfer engines meet there and at Redis.
need redis-server redis-server
need etcd etcd-server
need etcdctl etcd-client
need openssl openssl
# Scrapes a cluster in a test.
need prometheus prometheus
# Opens the dashboard.
need chromium chromium
need chromedriver chromium-driver
# The soak filters ports.
need iptables iptables
command -v cc >/dev/null || missing+=(gcc libc6-dev)

# Mooncake's package, which is measured against and tested with, brings all but these.
libraries=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
for library in libibverbs1:libibverbs.so.1 librdmacm1:librdmacm.so.1 libnuma1:libnuma.so.1 \
    liburing2:liburing.so.2 libcurl4:libcurl.so.4; do
    [[ $libraries == *"${library#*:}"* ]] || missing+=("${library%%:*}")
done

((${#missing[@]})) || exit 0
if [[ ${1-} == --install && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
    echo "Tests that need these are skipped: apt-get install ${missing[*]}"
fi
