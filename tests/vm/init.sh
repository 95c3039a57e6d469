#!/bin/bash
# Second stage of the test machine: its PID 1. Lays out the system as systemd would, as far as a
# sandbox can notice, runs one command and powers off.
#
#   .vm/account   root, tester, or tester-undelegated
#   .vm/command   the shell script to run as that account, in the project's folder; it finds
#                 PARACLE_TEST_EMULATED=1, because all is some ten times slower than usual
#
# PID 1 and the `cat` that carries the output to the console stay in the root cgroup; the command
# gets a scope below user.slice. When it has ended, every other process is killed through
# cgroup.kill, so that a leaked one cannot keep the output open and the machine up.

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CONSOLE=/dev/ttyS0
CGROUP=/sys/fs/cgroup

mount_system() {
    mount -t proc -o nosuid,nodev,noexec proc /proc
    mount -t sysfs -o nosuid,nodev,noexec sys /sys
    mount -t devtmpfs -o nosuid dev /dev
    mkdir -p /dev/pts /dev/shm
    mount -t devpts -o nosuid,noexec,gid=5,mode=620,ptmxmode=666 devpts /dev/pts
    mount -t tmpfs -o nosuid,nodev,mode=1777 shm /dev/shm
    mount -t tmpfs -o nosuid,nodev,mode=755 run /run
    mount -t cgroup2 -o nosuid,nodev,noexec,nsdelegate,memory_recursiveprot cgroup2 $CGROUP
    # The disk is thrown away: nothing on it need survive, so nothing is remounted at the end.
    mount --make-rshared /
    ln -s /proc/self/fd /dev/fd
    ln -s fd/0 /dev/stdin
    ln -s fd/1 /dev/stdout
    ln -s fd/2 /dev/stderr
}

load_modules() {
    # Nothing here loads a module on demand for an unprivileged caller, as udev would at boot.
    modprobe -a loop btrfs overlay veth bridge nf_tables nft_chain_nat nft_masq tun fuse
    hostname -F /etc/hostname
    ip link set lo up
}

delegate() {
    enable "$1" +cpu +memory +pids
    chown tester: "$1" "$1/cgroup.procs" "$1/cgroup.subtree_control" "$1/cgroup.threads"
}

enable() {
    local folder=$1
    shift
    echo "$*" >"$folder/cgroup.subtree_control"
}

# Prints the cgroup of the command. A user's programs run in a part of the tree that systemd gave
# to the user (a desktop, `systemd-run --user`), or in a session scope that it did not (ssh).
make_scope() {
    local slice=$CGROUP/user.slice/user-$2.slice
    mkdir -p "$slice"
    enable $CGROUP +cpu +memory +pids
    enable $CGROUP/user.slice +cpu +memory +pids
    enable "$slice" +cpu +memory +pids
    if [ "$1" = tester ]; then
        mkdir "$slice/user@$2.service"
        delegate "$slice/user@$2.service"
        setpriv --reuid=tester --regid=tester --init-groups \
            mkdir -p "$slice/user@$2.service/app.slice/command.scope"
        echo "$slice/user@$2.service/app.slice/command.scope"
    else
        mkdir "$slice/session-1.scope"
        echo "$slice/session-1.scope"
    fi
}

run_command() {
    local scope=$1 user=$2 uid=$3
    install -d -o "$user" -m 700 "/run/user/$uid"
    chown -R "$user": /project
    cd /project || return 125
    # shellcheck disable=SC2016  # expanded by the inner shell, which is what has to move
    setsid --wait sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$scope" \
        setpriv --reuid="$user" --regid="$user" --init-groups --reset-env \
        env TERM=dumb LANG=C.UTF-8 XDG_RUNTIME_DIR="/run/user/$uid" \
        PYTHONPATH=/project/src PARACLE_TEST_EMULATED=1 sh /project/.vm/command
}

kill_the_rest() {
    local switch
    for switch in $CGROUP/*/cgroup.kill; do
        echo 1 >"$switch"
    done
}

main() {
    local account user uid scope output code
    read -r account </project/.vm/account
    user=${account%-undelegated}
    uid=$(id -u "$user")
    load_modules
    scope=$(make_scope "$account" "$uid")
    echo "PARACLE-VM-START=$(cut -d' ' -f1 /proc/uptime)"

    dmesg --clear
    mkfifo /run/output
    cat /run/output &
    output=$!
    run_command "$scope" "$user" "$uid" >/run/output 2>&1
    code=$?
    kill_the_rest
    wait $output
    [ $code = 0 ] || dmesg | tail -n 40 | sed 's/^/kernel: /'
    printf '\nPARACLE-VM-EXIT=%d\n' $code
}

mount_system
dmesg -n 1
stty -F $CONSOLE -onlcr
main </dev/null >$CONSOLE 2>&1
# Changing a line setting waits until the line has sent everything.
stty -F $CONSOLE onlcr
echo o >/proc/sysrq-trigger
sleep 60
