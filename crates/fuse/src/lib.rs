//! The FUSE front end: a LibFS session acting for many users
