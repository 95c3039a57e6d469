#!/bin/busybox sh
# First stage of the test machine, in the boot archive: find the disk and go there.
#
# The kernel's first root cannot be pivoted away from, which a sandbox must be able to do: the
# tests therefore run on the disk. The second drive is not a filesystem but a tar file with the
# project's source, so that handing over a fresh tree costs neither mkfs nor a rebuilt archive.

PATH=/bin
busybox mount -t devtmpfs dev /dev
while read -r module; do
    busybox insmod "/modules/$module" || echo "boot: cannot load $module"
done </modules/order
busybox mount -t ext4 -o noatime /dev/vda /new || echo "boot: no disk"
busybox mkdir /new/project
busybox tar -x -f /dev/vdb -C /new/project || echo "boot: no project"
busybox umount /dev
exec busybox switch_root /new /bin/bash /project/tests/vm/init.sh
