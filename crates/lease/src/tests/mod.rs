mod property;
mod scenarios;
mod world;
