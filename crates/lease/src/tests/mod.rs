mod property;
mod stories;
mod world;
