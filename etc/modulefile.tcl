#%Module1.0
# Environment Modules: put @PREFIX@/modulefiles/tcl into MODULEPATH, then "module load elastic".
proc ModulesHelp {} {
    puts stderr "elastic @VERSION@: train on preemptible Slurm partitions without losing work. elastic --help"
}
module-whatis "elastic @VERSION@"
prepend-path PATH "@PREFIX@/@VERSION@/bin"
