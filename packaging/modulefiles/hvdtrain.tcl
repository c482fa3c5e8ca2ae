#%Module1.0
# Environment Modules: put this file into MODULEPATH as hvdtrain/VERSION, and set `root` to the
# environment that `make setup`, or `pip install` and `hvdtrain setup`, made. See
# docs/how-to/containers.md.
set root /opt/hvdtrain
if {[info exists ::env(HVDTRAIN_ROOT)]} { set root $::env(HVDTRAIN_ROOT) }

proc ModulesHelp {} {
    puts stderr "hvdtrain trains image classifiers on many processes, with Horovod and MPI."
    puts stderr "  hvdtrain doctor        checks this machine"
    puts stderr "  hvdtrain train --help  lists the options"
}
module-whatis "Trains image classifiers on many processes and explains what it got for them"

# With hvdtrain setup --mpi system, the module of the MPI that it was built for:
# module load openmpi

if {![file exists $root/bin/hvdtrain]} {
    puts stderr "hvdtrain is not in $root: set root in this modulefile, or HVDTRAIN_ROOT"
    break
}
prepend-path PATH $root/bin
setenv VIRTUAL_ENV $root
