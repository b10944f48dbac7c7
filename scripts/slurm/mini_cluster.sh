#!/usr/bin/env bash
# A Slurm of its own on this machine, for tests and experiments: ./scripts/slurm/mini_cluster.sh start|stop|status [folder]
#
# slurmctld, munged and two slurmd (nodes n1 and n2, 16 fake CPUs and 4 fake GPUs each), without cgroups or systemd.
# Needs root and the packages slurm-wlm and munge (Debian, Ubuntu). All its files are in the folder, in which nobody else
# may write: by default a new one in /tmp to start, and that of $SLURM_CONF to stop. Several clusters in several folders
# are independent. To use one: export SLURM_CONF=FOLDER/slurm.conf
#   GRACE_S=30        seconds between the warning and the kill, in a preemption
#   KILL_WAIT_S=30    the same after scancel and at the time limit
#   USER_SIGNAL=      1: a preemption also sends the signal of --signal; by default only SIGCONT and SIGTERM
# Partitions: general, whose jobs urgent preempts and requeues.
set -eu

PATH="$PATH:/usr/sbin:/sbin"

# The folder that is given, or a new one to start in, or that of $SLURM_CONF. Root runs and ends what the files in it
# name.
choose() {
    [ "$(id -u)" = 0 ] || fail "slurmd must be started by root"
    case "$1:$2" in
        start:) folder="$(mktemp -dt baton_slurm_XXXXXX)" ;;
        *:) [ -n "${SLURM_CONF:-}" ] || fail "which cluster? $0 $1 FOLDER, or export SLURM_CONF=FOLDER/slurm.conf"
            folder="$(realpath -m "$(dirname "$SLURM_CONF")")" ;;
        *) folder="$(realpath -m "$2")" ;;
    esac
    if [ "$1" = start ] && [ ! -e "$folder" ]; then
        mkdir -p "$(dirname "$folder")"
        mkdir -m 700 "$folder"
    fi
    [ -d "$folder" ] || fail "no cluster in $folder: $0 start $folder"
    [ "$(stat -c '%u %a' "$folder")" = "0 700" ] ||
        fail "$folder belongs to others, or they may look into it: name a folder that is root's alone (chmod 700)"
    export SLURM_CONF="$folder/slurm.conf"
}

start() {
    for tool in slurmctld slurmd munged; do
        command -v "$tool" > /dev/null || fail "there is no $tool here: apt-get install -y slurm-wlm munge"
    done
    if answers; then status; return; fi
    end_all
    for name in n1 n2; do
        getent hosts "$name" > /dev/null || echo "127.0.0.1 $name" >> /etc/hosts
    done
    configure
    [ -s "$folder/munge.key" ] || (umask 077; head -c 128 /dev/urandom > "$folder/munge.key")
    munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
        --seed-file="$folder/munge.seed" --log-file="$folder/munged.log" --num-threads=2
    slurmctld -c 2>> "$folder/start.log"
    for name in n1 n2; do slurmd -N "$name" 2>> "$folder/start.log"; done
    for _ in $(seq 300); do
        answers && { status; return; }
        sleep 0.2
    done
    tail -n 20 "$folder"/*.log >&2
    fail "the nodes did not come up within 60 s; the logs are in $folder"
}

configure() {
    mapfile -t port < <(python3 -c '
import socket
reserved = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*[one.getsockname()[1] for one in reserved], sep="\n")')
    cat > "$folder/gres.conf" <<END
NodeName=n[1-2] Name=gpu File=/dev/tty[0-3]
END
    cat > "$folder/slurm.conf" <<END
ClusterName=mini
FirstJobId=$((RANDOM + 1))  # the port of a job follows from its number, and two clusters may share this machine
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${port[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=${USER_SIGNAL:+preempt_send_user_signal}
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=5,sched_min_interval=0,bf_interval=5
JobRequeue=1
KillWait=${KILL_WAIT_S:-30}
MinJobAge=3600
MessageTimeout=60
SlurmdTimeout=300
ReturnToService=2
GresTypes=gpu
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=${port[1]} CPUs=16 RealMemory=16000 Gres=gpu:4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=${port[2]} CPUs=16 RealMemory=16000 Gres=gpu:4
PartitionName=general Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=${GRACE_S:-30}
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
    [ -n "${USER_SIGNAL:-}" ] || sed -i '/^SlurmctldParameters=$/d' "$folder/slurm.conf"
    mkdir -p "$folder/state" "$folder/spool.n1" "$folder/spool.n2"
}

answers() {
    runs slurmctld && [ "$(timeout 20 sinfo -h -N -p general -t idle,alloc,mix -o %N 2> /dev/null | wc -l)" = 2 ]
}

status() {
    answers || fail "no cluster in $folder: $0 start $folder"
    sinfo
    echo "export SLURM_CONF=$SLURM_CONF"
}

stop() {
    end_all
    echo "stopped: $folder"
}

# Ends the processes of this cluster by their pids: first those that start jobs, then the jobs.
end_all() {
    for signal in TERM KILL; do
        for name in slurmctld slurmd.n1 slurmd.n2; do
            ! runs "$name" || kill -s "$signal" "$(cat "$folder/$name.pid")" 2> /dev/null || true
        done
        for _ in $(seq 50); do
            runs slurmctld || runs slurmd.n1 || runs slurmd.n2 || break
            sleep 0.1
        done
    done
    for pid in $(of_jobs); do
        kill -KILL "$pid" 2> /dev/null || true
    done
    ! runs munged || kill "$(cat "$folder/munged.pid")" 2> /dev/null || true
}

runs() {
    pid="$(cat "$folder/$1.pid" 2> /dev/null || true)"
    [ -n "$pid" ] && grep -qs "^${1%%.*}" "/proc/$pid/comm"
}

# Slurm's own processes have this folder as working folder; those of its jobs have its configuration in their environment.
of_jobs() {
    for entry in $(grep -lsx slurmstepd /proc/[0-9]*/comm); do
        [ "$(readlink "${entry%/comm}/cwd")" != "$folder" ] || basename "${entry%/comm}"
    done
    for entry in $(grep -lszxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ); do
        ! grep -qsz '^SLURM_JOB_ID=' "$entry" || basename "${entry%/environ}"
    done
}

fail() {
    echo "mini_cluster: $1" >&2
    exit 1
}

case "${1:-}" in
    start | stop | status)
        choose "$1" "${2:-}"
        "$1"
        ;;
    *) fail "usage: $0 start|stop|status [folder]" ;;
esac
