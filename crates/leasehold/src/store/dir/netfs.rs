//! Recognises network file systems, on which the directory store would not be safe.
//!
//! Their locks and no-replace renames work on one client only, or not at all, and caches show one
//! client what another has already replaced.

/// The name of the network file system that `path` lies on, if it does.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn network_fs(root: &std::os::fd::OwnedFd) -> Option<String> {
    let magic = rustix::fs::fstatfs(root).ok()?.f_type;
    if let Some(name) = by_magic(magic as u64 & 0xffff_ffff) {
        return Some(name.to_owned());
    }
    // FUSE is anything: sshfs is a network, ntfs-3g is a disk. The mount's type says which.
    if magic as u64 & 0xffff_ffff != FUSE {
        return None;
    }
    let kind = || {
        let stat = rustix::fs::fstat(root).ok()?;
        let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        Some(mount_type(&mounts, &format!("{major}:{minor}"))?.to_owned())
    };
    // One that cannot be identified is not trusted.
    let kind = kind().unwrap_or_else(|| "an unknown kind of FUSE".to_owned());
    (!LOCAL_FUSE.contains(&kind.as_str())).then_some(kind)
}

/// Whether reading a folder shows every file that is there all the time, also one that is replaced
/// meanwhile: seen on ext4, and not on tmpfs.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn reads_steadily(root: &std::os::fd::OwnedFd) -> bool {
    const STEADY: [u64; 2] = [0xef53, 0x5846_5342];
    rustix::fs::fstatfs(root).is_ok_and(|fs| STEADY.contains(&(fs.f_type as u64 & 0xffff_ffff)))
}

/// Not known elsewhere.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn reads_steadily(_: &std::os::fd::OwnedFd) -> bool {
    false
}

/// The name of the network file system that `path` lies on, if it does.
#[cfg(target_vendor = "apple")]
pub fn network_fs(root: &std::os::fd::OwnedFd) -> Option<String> {
    const MNT_LOCAL: u32 = 0x1000;
    let stat = rustix::fs::fstatfs(root).ok()?;
    let name: Vec<u8> =
        stat.f_fstypename.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
    (stat.f_flags & MNT_LOCAL == 0).then(|| String::from_utf8_lossy(&name).into_owned())
}

/// Other systems are not told apart.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
pub fn network_fs(_: &std::os::fd::OwnedFd) -> Option<String> {
    None
}

#[cfg(any(target_os = "linux", target_os = "android", test))]
const FUSE: u64 = 0x6573_5546;

/// FUSE file systems on a disk of this machine.
#[cfg(any(target_os = "linux", target_os = "android", test))]
const LOCAL_FUSE: &[&str] = &[
    "fuse.ntfs-3g",
    "fuseblk",
    "fuse.exfat",
    "fuse.mergerfs",
    "fuse.lxcfs",
    "fuse.gocryptfs",
    "fuse.encfs",
    "fuse.fuse-overlayfs",
    "fuse.bindfs",
];

#[cfg(any(target_os = "linux", target_os = "android", test))]
fn by_magic(magic: u64) -> Option<&'static str> {
    Some(match magic {
        0x6969 => "nfs",
        0xff53_4d42 => "cifs",
        0xfe53_4d42 => "smb2",
        0x517b => "smb",
        0x0102_1997 => "9p",
        0x00c3_6400 => "ceph",
        0x5346_414f | 0x6b41_4653 => "afs",
        0x7375_7245 => "coda",
        0x0bd0_0bd0 => "lustre",
        0x4750_4653 => "gpfs",
        0x7461_636f => "ocfs2",
        0x0116_1970 => "gfs2",
        0x786f_4256 => "vboxsf",
        0x1983_0326 => "beegfs",
        0x2003_0528 => "orangefs",
        0xbacb_acbc => "vmhgfs",
        _ => return None,
    })
}

/// The type of the mount with this device number in `/proc/self/mountinfo`.
#[cfg(any(target_os = "linux", target_os = "android", test))]
fn mount_type<'a>(mounts: &'a str, device: &str) -> Option<&'a str> {
    mounts.lines().find_map(|line| {
        // "36 35 0:45 / /mnt rw,noatime shared:1 - fuse.sshfs host:/ rw"
        let (before, after) = line.split_once(" - ")?;
        (before.split(' ').nth(2)? == device).then(|| after.split(' ').next())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_their_magic() {
        assert_eq!(by_magic(0x6969), Some("nfs"));
        assert_eq!(by_magic(0xff53_4d42), Some("cifs"));
        assert_eq!(by_magic(0xef53), None, "ext4");
        assert_eq!(by_magic(FUSE), None, "decided by the mount's type");
    }

    #[test]
    fn fuse_is_told_apart_by_the_mount() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      36 22 0:45 / /mnt rw shared:1 - fuse.sshfs host:/ rw\n\
                      37 22 0:46 / /usb rw - fuseblk /dev/sda1 rw\n";
        assert_eq!(mount_type(mounts, "0:45"), Some("fuse.sshfs"));
        assert!(LOCAL_FUSE.contains(&mount_type(mounts, "0:46").unwrap()));
        assert_eq!(mount_type(mounts, "0:99"), None);
    }
}
