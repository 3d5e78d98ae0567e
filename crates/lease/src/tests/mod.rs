mod deep;
mod property;
mod scenarios;
mod world;
